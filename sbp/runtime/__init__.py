"""Running physical plans: executor, verification, training loop."""
