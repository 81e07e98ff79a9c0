package codeq

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/stretchr/testify/require"
)

func holdGroups(s *Settings) { s.HoldGroups = true }

// TestGroupHeld: with HoldGroups, a group waits for its dead letter however the task has
// died, and goes on in its order whatever then becomes of the dead letter.
func TestGroupHeld(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	deaths := map[string]func(p *Process, l *Lease){
		"given up": func(p *Process, l *Lease) {
			require.NoError(p.T, p.DeadLetter(ctx, l.Receipt, errors.New("boom")))
		},
		"out of attempts": func(p *Process, l *Lease) {
			require.NoError(p.T, p.Retry(ctx, l.Receipt, RetryOptions{After: -1}))
			l = p.Take("a")
			require.NoError(p.T, p.Retry(ctx, l.Receipt, RetryOptions{}))
		},
		"expired": func(p *Process, _ *Lease) {
			p.Pass(time.Minute)
			p.Take("a")
			p.Pass(time.Minute)
		},
	}
	ends := map[string]struct {
		first string // of those that are worked on then
		end   func(p *Process, id ID)
	}{
		"redriven":         {"1", func(p *Process, id ID) { require.NoError(p.T, p.RedriveDead(ctx, id)) }},
		"all are redriven": {"1", func(p *Process, _ ID) { p.EachDead(p.RedriveAllDead, DeadFilter{}) }},
		"some are redriven, at a rate": {"1", func(p *Process, id ID) {
			p.EachDead(p.RedriveAllDead, DeadFilter{
				Queue: "a", Tenants: []string{""}, Rate: 2, Match: func(t *TaskInfo) bool { return t.ID == id },
			})
		}},
		"purged":   {"2", func(p *Process, _ ID) { p.EachDead(p.PurgeDead, DeadFilter{}) }},
		"canceled": {"2", func(p *Process, id ID) { require.NoError(p.T, p.Cancel(ctx, id)) }},
	}
	for death, die := range deaths {
		for name, c := range ends {
			t.Run(death+", "+name, func(t *testing.T) {
				throughSteps(t, Options{Shards: 2, MaxAttempts: 2}, func(t *testing.T, p *Process) {
					configure(t, p.Queue, "a", holdGroups)
					ids := produce(t, p.Queue, named(Task{Queue: "a", Group: "g"}, "1", "2")...)
					p.Step()
					die(p, p.Take("a"))
					p.Step()
					require.Equal(t, []State{Dead, Blocked}, []State{p.StateOf(ids[0]), p.StateOf(ids[1])})
					ids = append(ids, produce(t, p.Queue, named(Task{Queue: "a", Group: "g"}, "3")...)...)
					p.Step()
					require.Equal(t, Blocked, p.StateOf(ids[2]))
					require.Nil(t, claimNow(t, p.Queue, "a"))

					c.end(p, ids[0])
					p.Step()
					order := []string{"1", "2", "3"}
					if c.first == "2" {
						order = order[1:]
					}
					requireNext(t, p.Queue, "a", order...)
					p.Step()
					requireNoGroups(t, p.Queue)
				})
			})
		}
	}
}

// EachDead does something with one dead letter.
func (p *Process) EachDead(how func(context.Context, DeadFilter) (int, error), which DeadFilter) {
	p.T.Helper()
	time.Sleep(time.Millisecond) // those of this millisecond may be left out
	n, err := how(context.Background(), which)
	require.NoError(p.T, err)
	require.Equal(p.T, 1, n)
}

// TestGroupHeldCrash: wherever a crash falls between a death and what follows on the end of
// the dead letter, the order is kept.
func TestGroupHeldCrash(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		disk := vfs.NewCrashableMem()
		opts := Options{Durability: DurabilityDisk, fs: disk}
		q := openForRun(t, opts)
		configure(t, q, "a", holdGroups)
		names := []string{"0", "1", "2", "3"}
		ids := produce(t, q, named(Task{Queue: "a", Group: "g"}, names...)...)
		im := keepImages(t, q, disk)
		ctx := t.Context()
		for i, id := range ids {
			l := claimNow(t, q, "a")
			require.Equal(t, id, l.ID)
			require.NoError(t, q.DeadLetter(ctx, l.Receipt, nil))
			requireSettled(t, q)
			switch i {
			case 0:
				require.NoError(t, q.RedriveDead(ctx, id))
				requireSettled(t, q)
				complete(t, q, claimNow(t, q, "a"))
			case 1:
				require.NoError(t, q.Cancel(ctx, id))
			default:
				time.Sleep(time.Millisecond)
				n, err := q.PurgeDead(ctx, DeadFilter{})
				require.NoError(t, err)
				require.Equal(t, 1, n)
			}
			requireSettled(t, q)
		}
		require.GreaterOrEqual(t, len(im.Images), 3*len(names))
		for i, image := range im.Images {
			opts.fs = image
			q := openForRun(t, opts)
			requireSettled(t, q)
			time.Sleep(time.Hour) // leases expire
			_, err := q.RedriveAllDead(ctx, DeadFilter{})
			require.NoError(t, err)
			requireSettled(t, q)
			counts, err := q.Stats(ctx)
			require.NoError(t, err)
			requireNext(t, q, "a", names[len(names)-int(counts["a"].Total()):]...)
			requireSettled(t, q)
			requireNoGroups(t, q)
			require.NoError(t, q.Close(), "image %d", i)
		}
	})
}
