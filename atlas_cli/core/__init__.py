"""The mathematics: pure functions of tensors."""
