package testbase

import (
	"testing"

	"github.com/stretchr/testify/require"
)

// recorder is a test that is allowed to fail.
type recorder struct {
	testing.TB
	failed bool
}

func (r *recorder) Helper()               {}
func (r *recorder) Fatalf(string, ...any) { r.failed = true }

var sink []byte

func TestDecode(t *testing.T) {
	for _, c := range []struct {
		input, takes int
		failed       bool
	}{{0, 0, false}, {10, 1 << 10, false}, {1 << 20, 8 << 20, false}, {10, 4 << 20, true}} {
		r := &recorder{TB: t}
		BoundDecode(r, c.input, func() { sink = make([]byte, c.takes) })
		require.Equal(t, c.failed, r.failed, "%d bytes for %d", c.takes, c.input)
	}
}
