"""How large the KV cache may be: by calculation or by measuring, and advice if it can't."""
