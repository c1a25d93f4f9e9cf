"""Names of modules that name no scope, read from call stacks, for rules and reports."""
