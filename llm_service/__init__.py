"""Language models without towers as a service: prompts with image keys in, text out."""
