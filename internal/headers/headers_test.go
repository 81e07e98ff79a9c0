package headers_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"codeq/internal/headers"
)

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
		require.Equal(t, tc.want, headers.InheritTrace(tc.own, tc.from, 25))
	}
}
