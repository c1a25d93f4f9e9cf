"""Running: `amp`, its compiled forms, and state that is kept from step to step."""
