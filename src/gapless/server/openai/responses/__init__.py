"""OpenAI's Responses API: a chat whose answer is a list of items. Nothing is stored between requests."""
