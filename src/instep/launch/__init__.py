"""instep.launch"""
