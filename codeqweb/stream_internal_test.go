package codeqweb

import (
	"net/http"
	"net/http/httptest"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"codeq"
)

// TestStreamsLoseAccess: a stream ends soon after its request has lost its access, and goes on
// while it has it.
func TestStreamsLoseAccess(t *testing.T) {
	for name, then := range map[string]func() Access{
		"none": func() Access { return None }, "less": func() Access { return Read },
		"panic": func() Access { panic("no session") },
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				q, err := codeq.Open(t.TempDir(), &codeq.Options{Shards: 1})
				require.NoError(t, err)
				defer q.Close()
				var lost atomic.Bool
				d := Handler(q, &Options{Access: func(*http.Request) Access {
					if lost.Load() {
						return then()
					}
					return Read | Payloads
				}})
				defer d.Close()
				var open atomic.Int32
				for _, path := range []string{"live?page=overview", "api/v1/events"} {
					r := httptest.NewRequest(http.MethodGet, "http://localhost/"+path, http.NoBody)
					open.Add(1)
					go func() {
						defer open.Add(-1)
						d.ServeHTTP(httptest.NewRecorder(), r)
					}()
				}
				time.Sleep(3*streamComment + time.Second)
				require.EqualValues(t, 2, open.Load())
				lost.Store(true)
				time.Sleep(streamComment)
				synctest.Wait()
				require.Zero(t, open.Load())
				require.Zero(t, d.streams.Load())
			})
		})
	}
}
