"""Other people's trainers: each module is imported only by who asks for it."""
