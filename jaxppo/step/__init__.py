"""The PPO step: packing, scoring and the update, pure and compiled."""
