"""Settings of all tests: how many examples property tests draw."""

try:
    from hypothesis import HealthCheck, settings
except ModuleNotFoundError:  # the tests that need it skip
    pass
else:
    # No deadlines: a slow machine is no wrong result. `make fuzz` asks for the profile with many examples.
    settings.register_profile("default", deadline=None, derandomize=True)
    settings.register_profile("fuzz", deadline=None, max_examples=2000, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("default")
