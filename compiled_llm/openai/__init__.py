"""OpenAI's requests and answers, as batch files (offline/) and the server (server/) have them."""
