package convert

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/stretchr/testify/require"

	"codeq/internal/base"
	"codeq/internal/manifest"
)

// owners are those of three shards, which note what they are told.
type owners struct {
	cluster bool
	refuse  func(shard int) (stands bool, err error) // of Stop; nil: all stand still
	resume  error
	told    []string
}

func (o *owners) Count() (shards int, cluster bool) { return 3, o.cluster }

func (o *owners) Stop(_ context.Context, shard int, _ uint64) (applied uint64, stands bool, err error) {
	stands = true
	if o.refuse != nil {
		stands, err = o.refuse(shard)
	}
	o.told = append(o.told, fmt.Sprint("stop ", shard))
	return uint64(10 + shard), stands, err
}

func (o *owners) Resume(ctx context.Context, n int, _ uint64) error {
	if end, ok := ctx.Deadline(); ok != o.cluster || ok && time.Until(end) != BarrierLimit {
		return errors.New("wrong limit")
	}
	o.told = append(o.told, fmt.Sprint("resume ", n))
	return o.resume
}

func (o *owners) Aside(f func()) {
	o.told = append(o.told, "aside")
	f()
}

// TestRaise: the owners stop in order. If one refuses, those before it go on, and it too if it may
// stand still; those of a cluster aside.
func TestRaise(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		o := new(owners)
		b, err := Raise(t.Context(), o)
		require.NoError(t, err)
		require.Equal(t, []uint64{10, 11, 12}, b.applied)
		require.NoError(t, b.Resume())
		require.Equal(t, []string{"stop 0", "stop 1", "stop 2", "resume 3"}, o.told)
		for _, c := range []struct {
			cluster, stands bool
			told            []string
		}{
			{false, false, []string{"stop 0", "stop 1", "resume 1"}},
			{true, true, []string{"stop 0", "stop 1", "aside", "resume 2"}},
		} {
			o = &owners{cluster: c.cluster, refuse: func(shard int) (bool, error) {
				if shard == 1 {
					return c.stands, base.ErrUncertain
				}
				return true, nil
			}}
			_, err = Raise(t.Context(), o)
			require.ErrorIs(t, err, base.ErrUncertain)
			require.Equal(t, c.told, o.told)
		}
	})
}

// TestCutAgain: in a cluster a copy is made again while a leader is lost, three times in all, and
// not when anything else fails or ctx has ended.
func TestCutAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := &Copy{Directory: manifest.New(vfs.NewMem(), "copy", manifest.Manifest{Shards: 3})}
		other := errors.New("other")
		for _, try := range []struct {
			cluster bool
			err     error
			copies  int
		}{
			{true, nil, 1},
			{true, base.ErrNotLeader, cutTries},
			{true, base.ErrUncertain, cutTries},
			{true, other, 1},
			{false, base.ErrUncertain, 1},
		} {
			o, copies := &owners{cluster: try.cluster, resume: try.err}, 0
			stood, err := c.Cut(t.Context(), o, func(applied []uint64) error {
				require.Equal(t, []uint64{10, 11, 12}, applied)
				copies++
				time.Sleep(time.Second)
				return nil
			})
			require.ErrorIs(t, err, try.err)
			require.Equal(t, try.copies, copies)
			require.Equal(t, time.Second, stood)
		}
		ctx, end := context.WithCancel(t.Context())
		copies := 0
		_, err := c.Cut(ctx, &owners{cluster: true}, func([]uint64) error {
			if copies++; copies == 2 {
				end()
				return ctx.Err()
			}
			return base.ErrNotLeader
		})
		require.Equal(t, 2, copies)
		require.ErrorIs(t, err, base.ErrNotLeader, "the reason of the first try is in the error")
		require.ErrorIs(t, err, context.Canceled)
	})
}
