"""instep.data"""
