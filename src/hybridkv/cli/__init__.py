"""The `hybridkv` command and its subcommands."""
