"""`manta bench`: a load generator for any OpenAI endpoint, and its figures."""
