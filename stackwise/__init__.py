"""Is a transformer architecture right, is it stable, is it fast?"""
