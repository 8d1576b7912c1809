"""What bytes mean: namespace fingerprint, record keys, key builders."""
