package codeq

import (
	"testing"

	"github.com/stretchr/testify/require"
)

// TestInheritTrace: the trace context of a task passes to another one as a whole, unless that has
// one, or no room.
func TestInheritTrace(t *testing.T) {
	type header = map[string]string
	from := header{"traceparent": "p", "tracestate": "s", "other": "o"}
	for _, tc := range []struct{ own, from, want header }{
		{nil, from, header{"traceparent": "p", "tracestate": "s"}},
		{header{"a": "b"}, from, header{"a": "b", "traceparent": "p", "tracestate": "s"}},
		{nil, header{"traceparent": "p"}, header{"traceparent": "p"}},
		{header{"traceparent": ""}, from, header{"traceparent": ""}},
		{header{"tracestate": "x"}, from, header{"tracestate": "x"}},
		{header{"a": "b"}, header{"tracestate": "s"}, header{"a": "b"}},
		{header{"a": "far too long"}, from, header{"a": "far too long"}},
	} {
		require.Equal(t, tc.want, inheritTrace(tc.own, tc.from, 25))
	}
}
