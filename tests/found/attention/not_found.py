"""Spellings that are not found, in which order and why. What is found leaves this list."""

APART = "the softmax is in a function of its own, and nothing is said of it"
_OWN = "a row may be masked whole, and has weights of its own then"

NOT_FOUND: dict[tuple[str, str], str] = {
    ("safe_softmax", "forward"): _OWN,
    ("softmax_with_its_own_rule", "forward"): APART,
    ("layers_scanned_with_saved_products", "joint"): "weights are returned",
    ("checkpoint_of_weights", "forward"): APART,
    (
        "checkpoint_of_weights",
        "joint",
    ): "weights are changed before they multiply the values; weights are returned",
    ("pixels_normalized_late", "joint"): "weights are read elsewhere",
    ("values_of_one_branch", "joint"): "weights are returned",
}
