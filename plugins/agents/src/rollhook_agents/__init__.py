"""The shell, oracle and nop agents."""
