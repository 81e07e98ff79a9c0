package dispatch_test

import (
	"context"
	"errors"
	"log/slog"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"codeq/internal/base"
	"codeq/internal/dispatch"
	"codeq/internal/engine"
)

// host has tasks in one shard. In the end, another node leads this shard.
type host struct {
	led   chan struct{}       // closes when another node leads
	way   time.Duration       // the delay of an answer
	tasks chan []engine.Grant // for the next claim

	mu     sync.Mutex // guards the fields below
	asked  []int      // the numbers of tasks asked for
	ended  int        // claims
	lost   []engine.Receipt
	back   []engine.Receipt
	served []*dispatch.Claim
}

func (h *host) Watch(int) (elsewhere bool, change <-chan struct{}) {
	select {
	case <-h.led:
		return true, nil
	default:
		return false, h.led
	}
}

func (h *host) Claim(ctx context.Context, _ int, r dispatch.LineRequest) ([]engine.Grant, error) {
	h.mu.Lock()
	h.asked = append(h.asked, r.Max)
	h.mu.Unlock()
	select {
	case grants := <-h.tasks:
		time.Sleep(h.way)
		return grants, nil
	case <-ctx.Done():
		h.mu.Lock()
		defer h.mu.Unlock()
		h.ended++
		return nil, ctx.Err()
	}
}

func (h *host) Renew(_ context.Context, _ int, leases []engine.Receipt, _ uint64) ([]engine.Receipt, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.lost = append(h.lost, leases[0])
	return leases[:1], nil
}

func (h *host) GiveBack(_ context.Context, lease engine.Receipt) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.back = append(h.back, lease)
}

func (h *host) Served(c *dispatch.Claim) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.served = append(h.served, c)
}

// caller notes the reason for the refusal of its claim.
type caller struct{ err error }

func (c *caller) Finish(err error) { c.err = err }

// inTable runs f with a table, and closes the table afterwards.
func inTable(t *testing.T, h *host, f func(*testing.T, *dispatch.ClaimLines)) {
	synctest.Test(t, func(t *testing.T) {
		h.led, h.tasks = make(chan struct{}), make(chan []engine.Grant, 1)
		ctx, cancel := context.WithCancel(t.Context())
		var background sync.WaitGroup
		table := dispatch.NewClaimLines(dispatch.LinesConfig{
			Shards: 1, Batch: 8, Context: ctx, Background: &background, Log: slog.New(slog.DiscardHandler),
			PanicError: func(string, any, []byte) error { return errors.New("panic") }, Now: time.Now,
		}, h)
		f(t, table)
		cancel()
		background.Wait()
	})
}

func newClaim(tasks int) *dispatch.Claim {
	return &dispatch.Claim{Queues: []string{"a"}, Duration: 1000, Max: tasks, Caller: new(caller)}
}

func grant(token uint64) engine.Grant {
	return engine.Grant{Receipt: engine.Receipt{Token: token}, LaneKey: new(engine.LaneKey), Rec: []byte{0}}
}

// TestLine: a line asks for the tasks that its claims want, and serves the claims in turn; the
// remaining tasks go back.
func TestLine(t *testing.T) {
	h := new(host)
	inTable(t, h, func(t *testing.T, table *dispatch.ClaimLines) {
		first, second, gone := newClaim(1), newClaim(2), newClaim(1)
		var place dispatch.LinePlace
		queues, _, added := table.Add(first, &place)
		require.True(t, added)
		require.Equal(t, []string{"a"}, queues)
		_, _, again := table.Add(first, &place)
		require.False(t, again)
		for _, c := range []*dispatch.Claim{second, gone} {
			_, _, added := table.Add(c, new(dispatch.LinePlace))
			require.True(t, added)
		}
		synctest.Wait()
		require.Empty(t, h.asked)
		close(h.led)
		synctest.Wait()
		require.Equal(t, []int{4}, h.asked)
		listed := 0
		table.Each(func(dispatch.Ticket, []string, *dispatch.List) { listed++ })
		require.Equal(t, 3, listed)
		require.True(t, gone.Take()) // its caller gives up
		h.tasks <- []engine.Grant{grant(0), grant(1), grant(2), grant(3)}
		synctest.Wait()
		require.Equal(t, []*dispatch.Claim{first, second}, h.served)
		require.Len(t, first.Grants, 1)
		require.Len(t, second.Grants, 2)
		require.Equal(t, []engine.Receipt{{Token: 3}}, h.back)
		require.Empty(t, h.lost)
	})
}

// TestOldLeasesAreRenewed: the line renews leases that were under way for half of their time before
// a claim gets them. The claim does not get lost leases.
func TestOldLeasesAreRenewed(t *testing.T) {
	h := &host{way: 500 * time.Millisecond}
	inTable(t, h, func(t *testing.T, table *dispatch.ClaimLines) {
		c := newClaim(2)
		table.Add(c, new(dispatch.LinePlace))
		h.tasks <- []engine.Grant{grant(1), grant(2)}
		close(h.led)
		time.Sleep(time.Second)
		synctest.Wait()
		require.Equal(t, []engine.Receipt{{Token: 1}}, h.lost)
		require.Len(t, c.Grants, 1)
		require.EqualValues(t, 2, c.Grants[0].Receipt.Token)
	})
}

// TestClose: the table refuses waiting claims and later ones.
func TestClose(t *testing.T) {
	h := new(host)
	inTable(t, h, func(t *testing.T, table *dispatch.ClaimLines) {
		early, late := newClaim(1), newClaim(1)
		table.Add(early, new(dispatch.LinePlace))
		table.End(base.ErrClosed)
		_, _, added := table.Add(late, new(dispatch.LinePlace))
		require.False(t, added)
		for _, c := range []*dispatch.Claim{early, late} {
			require.ErrorIs(t, c.Caller.(*caller).err, base.ErrClosed)
		}
	})
}

// TestIdleLine: while claims wait, the line's claim at the other node goes on. When no claim waits
// any more, the line's claim ends, and the next waiting claim makes another one.
func TestIdleLine(t *testing.T) {
	h := new(host)
	inTable(t, h, func(t *testing.T, table *dispatch.ClaimLines) {
		close(h.led)
		claims := func() (asked int) {
			synctest.Wait()
			h.mu.Lock()
			defer h.mu.Unlock()
			return len(h.asked) - h.ended
		}
		for range 3 {
			c := newClaim(1)
			table.Add(c, new(dispatch.LinePlace))
			time.Sleep(10 * time.Minute)
			require.Equal(t, 1, claims())
			require.True(t, c.Take())
			time.Sleep(9 * time.Second)
			require.Equal(t, 1, claims(), "the next claim may come soon")
			time.Sleep(12 * time.Second)
			require.Zero(t, claims())
		}
		require.Len(t, h.asked, 3)
	})
}
