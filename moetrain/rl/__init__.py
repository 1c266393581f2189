"""Reinforcement learning on packed rollouts. Its parts can be used without the loop.

    trajectories -> advantages -> samples -> rows (packed) -> score -> corrected -> PolicyObjective

``Engine.forward_backward`` minimises a :class:`~moetrain.rl.losses.PolicyObjective`. The steps
before it prepare its micro-batches (:mod:`moetrain.train.samples`).

The loop is :class:`~moetrain.rl.loop.RlTrainer` (``python -m moetrain.rl``). A
:class:`~moetrain.rl.collect.Collector` plays the tasks of an environment (:mod:`moetrain.rl.envs`)
with a generator, and a :class:`~moetrain.rl.learn.Learner` updates the weights.
"""
