"""Reinforcement learning on packed rollouts. Its parts can be used without our loop.

    trajectories -> advantages -> samples -> rows (packed) -> score -> corrected -> PolicyObjective

``Engine.forward_backward`` minimises a :class:`~moetrain.rl.losses.PolicyObjective`; the rest
prepares its micro-batches.

Our own loop is :class:`~moetrain.rl.loop.RlTrainer` (``python -m moetrain.rl``): a
:class:`~moetrain.rl.collect.Collector` plays the tasks of an environment (:mod:`moetrain.rl.envs`)
with a generator, and a :class:`~moetrain.rl.learn.Learner` updates the weights.
"""
