"""Generation: tokens one after another, by whatever model can `begin` and `advance`."""
