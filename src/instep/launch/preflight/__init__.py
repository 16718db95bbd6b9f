"""Before anything starts: whether the machines are alike, share the folder, and where they can all meet.

In the agent of each machine run :func:`instep.launch.preflight.facts.gather`, a
:class:`instep.launch.preflight.meeting.Listener` and :func:`instep.launch.preflight.meeting.reach`; the launcher judges
what they bring: :func:`instep.launch.preflight.compare.check` and :func:`instep.launch.preflight.meeting.choose`.
"""
