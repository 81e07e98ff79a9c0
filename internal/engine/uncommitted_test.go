package engine

import (
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"codeq/internal/keys"
	"codeq/internal/record"
)

// TestChildrenShareCommits: many children of an existing task share commits, for a parent that is
// ready, leased, scheduled, blocked or dead.
func TestChildrenShareCommits(t *testing.T) {
	t.Parallel()
	const children = 400
	later := record.Record{Head: record.Head{RunAt: storyStart + 3_600_000}}
	one := func(r *ruled, rec record.Record) keys.ID { return r.produce(newTask(LaneKey{Queue: "p"}, rec))[0] }
	for name, prepare := range map[string]func(r *ruled) keys.ID{
		"ready":     func(r *ruled) keys.ID { return one(r, record.Record{}) },
		"scheduled": func(r *ruled) keys.ID { return one(r, later) },
		"blocked": func(r *ruled) keys.ID {
			first := r.produce(newTask(LaneKey{Queue: "first"}, record.Record{}))[0]
			return one(r, record.Record{Parents: [][record.IDLen]byte{first}})
		},
		"leased": func(r *ruled) keys.ID {
			one(r, record.Record{})
			return r.claim("p", 1)[0].Receipt.ID
		},
		"dead": func(r *ruled) keys.ID {
			one(r, record.Record{})
			l := r.claim("p", 1)[0].Receipt
			r.in(func() (Verdict, error) { return r.State.Fail(l, FailDead, nil, 0, "") })
			r.end()
			return l.ID
		},
	} {
		t.Run(name, func(t *testing.T) {
			r := newRuled(t, Config{})
			parent := prepare(r)
			r.settle()
			tasks := make([]NewTask, children)
			for i := range tasks {
				tasks[i] = newTask(LaneKey{Queue: "c"}, record.Record{OnDead: keys.HoldOnDead, Parents: [][record.IDLen]byte{parent}})
			}
			before := r.commits
			r.produce(tasks...)
			r.settle()
			require.LessOrEqual(t, r.commits-before, children/10, "commits for children")
			require.EqualValues(t, children, r.countsOf("c").Blocked)
			r.in(func() (Verdict, error) { return r.Alter(parent, AlterCancel, AlterTo{}) }) // this cancels them
			r.settle()
			require.Zero(t, r.countsOf("c").Blocked)
		})
	}
}

// TestDebounceSharesCommits: many produces that replace each other share a commit, and the last one
// stays.
func TestDebounceSharesCommits(t *testing.T) {
	t.Parallel()
	const calls = 200
	later := record.Record{Head: record.Head{RunAt: storyStart + 3_600_000}}
	for name, like := range map[string]record.Record{"ready": {}, "scheduled": later, "in a group": {GroupKey: "g"}} {
		t.Run(name, func(t *testing.T) {
			r := newRuled(t, Config{})
			if like.GroupKey != "" {
				r.produce(newTask(LaneKey{Queue: "q"}, like))
			}
			var first keys.ID
			before := r.commits
			for i := range calls {
				next := like
				next.Payload = fmt.Append(nil, i)
				next.UniqueKey, next.UniqueFor, next.Flags = "k", uint64(i%2)*uint64(time.Hour/time.Millisecond), record.ReplaceWaiting
				id := r.add(newTask(LaneKey{Queue: "q", Priority: uint8(i % 3)}, next))[0]
				if i == 0 {
					first = id
				}
				require.Equal(t, first, id)
			}
			r.settle()
			require.LessOrEqual(t, r.commits-before, 3, "commits")
			require.NoError(t, r.check(r.drivenShard))
			r.reopen()
			require.Equal(t, fmt.Append(nil, calls-1), r.find(first).rec.Payload)
			r.settle()
		})
	}
}
