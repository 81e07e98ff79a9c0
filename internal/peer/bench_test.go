package peer

import (
	"context"
	"fmt"
	"net"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"
)

// BenchmarkCall measures callers that each make one call after another, over TCP, to a Handler that
// answers at once.
func BenchmarkCall(b *testing.B) {
	for _, callers := range []int{1, 32, 128} {
		b.Run(fmt.Sprintf("callers=%d", callers), func(b *testing.B) {
			var dialer net.Dialer
			dial := func(ctx context.Context, addr string) (net.Conn, error) {
				return dialer.DialContext(ctx, "tcp", addr)
			}
			var nodes [2]*Node
			var to Target
			for i := range nodes {
				l, err := net.Listen("tcp", "127.0.0.1:0")
				require.NoError(b, err)
				self := identityOf(fmt.Sprint(i))
				to = Target{self.ID, self.Name, l.Addr().String()}
				nodes[i] = New(Config{
					Identity: self, Listener: l, Dial: dial,
					Handler: func(r *Request) { r.Reply(r.Body) },
				})
				defer nodes[i].Close()
			}
			body := make([]byte, 100)
			call := func(n int) {
				for range n {
					reply, err := nodes[0].Call(b.Context(), to, 1, body)
					if err != nil || len(reply) != len(body) {
						b.Errorf("%d bytes, %v", len(reply), err)
						return
					}
				}
			}
			call(1)
			b.ReportAllocs()
			b.ResetTimer()
			var done sync.WaitGroup
			for i := range callers {
				done.Go(func() { call((b.N + i) / callers) })
			}
			done.Wait()
			b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "calls/s")
		})
	}
}
