"""Reinforcement learning on packed rollouts, of use without a loop of ours.

    outcomes -> advantages -> samples -> rows (packed) -> score -> importance -> PolicyObjective

:class:`~moetrain.rl.losses.PolicyObjective` is what ``Engine.forward_backward`` trains; the rest
prepares its micro-batches.

The loop that is ours: :mod:`~moetrain.rl.envs` are what is learned, a
:class:`~moetrain.rl.collect.Collector` plays them by a generator, and
:class:`~moetrain.rl.trainer.RlTrainer` is a run of it all, ``python -m moetrain.rl``.
"""
