"""One agent on each machine, started by ssh; on the launcher's own machine as a plain child.

The launcher holds one :class:`instep.launch.agents.remote.Connection` to each :mod:`instep.launch.agents.agent`. What
is said goes through the agent's standard input and output, one JSON object a line
(:mod:`instep.launch.agents.channel`): nothing of the job stands on a command line but the marker by which its processes
are known.

Each object has one key. From the launcher: hello, look, listen, reach, start, signal, sweep, kill, again, ping, pause,
execute, guard, end. From the agent: hello, facts, listening, reached, started, ended, report, output, swept, lost,
pong, exited, guard, error.
"""

PROTOCOL = 1
PING_S = 1.0  # how often the launcher shows that it lives
SILENT_S = 6.0  # who has not been heard for so long is taken for gone, on both sides
