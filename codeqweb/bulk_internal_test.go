package codeqweb

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	"runtime"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"

	"codeq"
)

// TestCloseEndsBulk: a bulk change that is known when Close begins ends before Close returns: Audit
// is not called later.
func TestCloseEndsBulk(t *testing.T) {
	q, err := codeq.Open(t.TempDir(), &codeq.Options{Shards: 1})
	require.NoError(t, err)
	defer func() { require.NoError(t, q.Close()) }()
	var closed, late atomic.Bool
	d := Handler(q, &Options{
		Access: func(*http.Request) Access { return All },
		Audit:  func(*http.Request, *Entry) { late.Store(late.Load() || closed.Load()) },
	})
	r := httptest.NewRequest(http.MethodPost, "http://localhost/api/v1/bulk", strings.NewReader(`{"Action": "redrive", "DryRun": true}`))
	for i := range 200_000 { // it takes long to copy
		r.Header[fmt.Sprint("X-", i)] = []string{"a"}
	}
	answered := make(chan struct{})
	go func() {
		defer close(answered)
		d.ServeHTTP(httptest.NewRecorder(), r)
	}()
	for len(d.bulks.newest()) == 0 {
		runtime.Gosched()
	}
	require.NoError(t, d.Close())
	closed.Store(true)
	<-answered
	require.False(t, late.Load())
}
