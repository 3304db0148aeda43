"""``delta bench``: compare token credits on equal terms, with a referee that knows where the mistake is."""
