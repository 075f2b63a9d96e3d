"""What is made of sweeps: support of operators, reports, trends over releases, lists for test suites."""
