"""Client of lossd: the last stage of language-model training as a service."""
