"""Spellings that are not found, in which order and why. What is found leaves this list."""

NOT_FOUND: dict[tuple[str, str], str] = {
    ("matrices", "forward"): "scores are not a product of queries and keys times a number",
    ("matrices", "joint"): "scores are not a product of queries and keys times a number",
    (
        "scale_by_a_root_of_jax",
        "forward",
    ): "scores are not a product of queries and keys times a number",
    (
        "scale_by_a_root_of_jax",
        "joint",
    ): "scores are not a product of queries and keys times a number",
    ("scale_by_rsqrt", "forward"): "scores are not a product of queries and keys times a number",
    ("scale_by_rsqrt", "joint"): "scores are not a product of queries and keys times a number",
    ("multiplied_mask", "forward"): "scores are not a product of queries and keys times a number",
    ("multiplied_mask", "joint"): "scores are not a product of queries and keys times a number",
    ("padding_by_lengths", "forward"): "a row may be masked whole, where -inf gives NaN",
    ("causal_then_padding", "joint"): "weights are returned",
    ("segments", "forward"): "a row may be masked whole, where -inf gives NaN",
    ("mask_of_examples", "forward"): "a row may be masked whole, where -inf gives NaN",
    ("softmax_with_where", "forward"): "no reason is given",
    ("softmax_with_where", "joint"): "weights are changed before they multiply the values",
    ("weights_masked_again", "joint"): "weights are returned",
    ("by_hand_through_the_maximum", "joint"): "weights are returned",
    ("by_a_reciprocal", "joint"): "weights are returned",
    ("powers_of_two", "joint"): "weights are returned",
    ("safe_softmax", "forward"): "a row may be masked whole, where -inf gives NaN",
    ("softmax_with_its_own_rule", "forward"): "no reason is given",
    ("keys_repeated", "joint"): "weights are read elsewhere",
    ("keys_broadcast", "joint"): "weights are read elsewhere",
    ("self_then_cross", "forward"): "scores are not a product of queries and keys times a number",
    (
        "self_then_cross",
        "joint",
    ): "scores are not a product of queries and keys times a number; weights are read elsewhere",
    ("two_of_the_same_keys", "joint"): "weights are read elsewhere",
    ("layers_scanned", "joint"): "scores are not a product of queries and keys times a number",
    (
        "layers_scanned_with_saved_products",
        "joint",
    ): "scores are not a product of queries and keys times a number",
    (
        "layers_scanned_with_unrolling",
        "joint",
    ): "scores are not a product of queries and keys times a number",
    ("checkpoint_of_weights", "forward"): "no reason is given",
    (
        "checkpoint_of_weights",
        "joint",
    ): "weights are changed before they multiply the values; weights are returned",
    ("queries_in_chunks", "joint"): "weights are returned",
    ("shard_mapped", "joint"): "weights are returned",
    ("values_of_one_branch", "joint"): "weights are returned",
    ("linen_masks_combined", "forward"): "a row is masked whole",
    ("linen_masks_combined", "joint"): "a row is masked whole",
    ("equinox_in_a_scan", "joint"): "weights are returned",
    ("transformers_bert", "forward"): "weights are changed before they multiply the values",
    ("transformers_bert", "joint"): "weights are changed before they multiply the values",
    ("transformers_llama", "joint"): "weights are read elsewhere",
    ("transformers_mistral", "joint"): "weights are read elsewhere",
}

FOUND_BESIDE = {("largest_weight", "joint"), ("sown_weights", "forward"), ("sown_weights", "joint")}
"""Near misses of which a part is attention: a loss that reads no index, and an initialisation."""
