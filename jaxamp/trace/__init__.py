"""From a call to a jaxpr: arguments split into arrays and static values, and traced."""
