package workerpool_test

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"codeq/internal/workerpool"
)

// filling is a batch of at most 5 jobs, to which claims bring some each.
func filling(p *pool, brings ...int) (f *workerpool.Filling[*job], room *int, waits *[]bool) {
	room, waits = new(int), new([]bool)
	*room = 5
	return &workerpool.Filling[*job]{
		Ready: 2, Until: time.Now().Add(time.Minute),
		Room: func(context.CancelFunc) int {
			if *room == 0 {
				return -1
			}
			return *room
		},
		Claim: func(ctx context.Context, most int, noWait bool) (int, []*job, error) {
			*waits = append(*waits, !noWait)
			if len(brings) == 0 || noWait && brings[0] == 0 {
				if len(brings) > 0 {
					brings = brings[1:]
				}
				if !noWait {
					<-ctx.Done()
				}
				return 0, nil, errors.New("none")
			}
			n := min(brings[0], most)
			brings = brings[1:]
			*room -= n
			return n, nil, nil
		},
	}, room, waits
}

// TestFill: a batch takes what is ready, and then waits for more, until it is full or the time is
// over.
func TestFill(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newHost(workerpool.Config{Workers: 1, Batch: 1, Grace: time.Second})
		ctx, end := context.WithCancel(t.Context())
		defer end()

		f, room, waits := filling(h.pool, 3, 2)
		f.Claims = ctx
		begin := time.Now()
		require.True(t, h.pool.Fill(f))
		require.Zero(t, *room)
		require.Equal(t, []bool{false, false}, *waits, "of those that are ready")
		require.Zero(t, time.Since(begin))
		require.Equal(t, 5, h.pool.Claimed(), "in the place of the batch")

		f, room, waits = filling(h.pool, 0, 1, 1)
		f.Claims = ctx
		require.True(t, h.pool.Fill(f))
		require.Equal(t, 3, *room)
		require.Equal(t, []bool{false, true, true, true}, *waits)
		require.Equal(t, time.Minute, time.Since(begin))

		f, _, waits = filling(h.pool)
		f.Claims, f.Until = ctx, time.Now()
		require.True(t, h.pool.Fill(f))
		require.Equal(t, []bool{false}, *waits, "it takes what is ready only")

		f, _, waits = filling(h.pool, 1)
		f.Claims = ctx
		h.pool.Quiet()
		require.True(t, h.pool.Fill(f))
		require.Empty(t, *waits, "a quiet pool claims nothing")
		h.pool.Resume()
		end()
		require.False(t, h.pool.Fill(f))
		require.Empty(t, *waits)
	})
}

// TestFillGivesBack: jobs that open other batches wait for places, and come back if the pool has
// ended meanwhile.
func TestFillGivesBack(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newHost(workerpool.Config{Workers: 1, Batch: 1})
		f, _, _ := filling(h.pool)
		f.Claims, f.Until = t.Context(), time.Now()
		f.Claim = func(context.Context, int, bool) (int, []*job, error) {
			h.pool.Drain(nil)
			return 2, []*job{new(job)}, nil
		}
		f.Ready = 1
		h.pool.Fill(f)
		require.EqualValues(t, 1, h.left.Load())
	})
}
