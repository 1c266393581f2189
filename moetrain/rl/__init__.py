"""Reinforcement learning on packed rollouts, of use without a loop of ours.

    outcomes -> advantages -> samples -> rows (packed) -> score -> importance -> PolicyObjective

:class:`~moetrain.rl.losses.PolicyObjective` is what ``Engine.forward_backward`` trains; the rest
prepares its micro-batches.
"""
