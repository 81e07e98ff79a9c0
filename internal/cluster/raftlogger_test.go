package cluster

import (
	"bytes"
	"log/slog"
	"testing"

	"github.com/hashicorp/go-hclog"
	"github.com/stretchr/testify/require"
)

// TestRaftLogger: what Raft logs keeps its fields, at the levels of the library.
func TestRaftLogger(t *testing.T) {
	var b bytes.Buffer
	l := newRaftLogger(slog.New(slog.NewTextHandler(&b, &slog.HandlerOptions{
		Level: slog.LevelDebug,
		ReplaceAttr: func(_ []string, a slog.Attr) slog.Attr {
			if a.Key == slog.TimeKey {
				return slog.Attr{}
			}
			return a
		},
	})))
	l.Error("failed to heartbeat to", "peer", "b")
	l.Warn("heartbeat timeout reached", "members", hclog.Fmt("%d of %s", 2, "a"))
	l.Named("net").With("shard", 1).Info("accepted")
	l.Debug("not logged")
	require.True(t, l.IsInfo())
	require.False(t, l.IsDebug())
	require.Equal(t, `level=WARN msg="failed to heartbeat to" in=raft peer=b
level=INFO msg="heartbeat timeout reached" in=raft members="2 of a"
level=DEBUG msg=accepted in=raft part=net shard=1
`, b.String())
}
