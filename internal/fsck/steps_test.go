package fsck

import (
	"maps"
	"testing"

	"github.com/stretchr/testify/require"

	"codeq/internal/keys"
	"codeq/internal/record"
)

// TestRebuildSteps damages the steps and signals of a task that waits for a signal. Verify finds
// it, and after a repair the task goes on after the last step that is left.
func TestRebuildSteps(t *testing.T) {
	type entries = map[string]string
	f := newFixture(t, "identity of the shard")
	place := keys.Place{Range: keys.Scheduled, At: 12345}
	recorded := func(e entries, steps uint32, beside uint8) {
		rec := record.Record{Head: record.Head{Steps: steps, Beside: beside}}
		e[string(place.AppendKey(nil, f.later))] = string(append(keys.AppendLaneNumber(nil, fixtureLane), rec.Encode()...))
	}
	key := func(id keys.ID, n uint16) string { return string(keys.AppendStep(nil, id, n)) }
	step := func(kind record.StepKind, size int) string {
		return string((&record.Step{Kind: kind, Name: "s", Result: make([]byte, size)}).Append(nil))
	}
	signals := string(record.Signals{{Name: "t", Size: 2, Value: []byte("ok")}, {Name: "u", Size: 3, Taken: true}}.Append(nil))
	const both = record.HasSignals | record.HasCursors
	recorded(f.entries, 2, both|record.Awaits)
	f.entries[key(f.later, 0)], f.entries[key(f.later, 1)] = step(record.StepResult, 1), step(record.StepNoSignal, 0)
	f.entries[key(f.later, keys.SignalsNumber)] = signals
	f.entries[key(f.later, keys.CursorsNumber)] = string(record.Cursors{"c": []byte("v")}.Append(nil))
	sound := f.write(f.entries)
	r, err := Verify(sound, "queue", testRules, true, false)
	require.NoError(t, err)
	require.Empty(t, r.Problems)

	for name, c := range map[string]struct {
		damage func(entries)
		says   string
		want   func(entries) // nil: the content before
	}{
		"last step": {func(e entries) { delete(e, key(f.later, 1)) }, "has 1 steps, its record says 2", func(e entries) {
			delete(e, key(f.later, 1))
			recorded(e, 1, both)
		}},
		"first step": {func(e entries) { delete(e, key(f.later, 0)) }, "follows 0 others", func(e entries) {
			delete(e, key(f.later, 0))
			delete(e, key(f.later, 1))
			recorded(e, 0, both)
		}},
		"record that says nothing of signals": {func(e entries) { recorded(e, 2, record.HasCursors|record.Awaits) }, "its record says that it has none", nil},
		"record that says nothing": {func(e entries) { recorded(e, 0, 0) }, "has 2 steps, its record says 0", func(e entries) {
			recorded(e, 2, both)
		}},
		"step of an ended task": {func(e entries) { e[key(f.done, 0)] = step(record.StepResult, 1) }, "has ended", nil},
		"signals of nothing":    {func(e entries) { e[key(keys.ID{1}, keys.SignalsNumber)] = signals }, "has ended", nil},
		"number of a step":      {func(e entries) { e[key(f.later, record.MaxSteps)] = step(record.StepResult, 1) }, "follows 2 others", nil},
		"bytes of steps":        {func(e entries) { e[key(f.later, 2)] = step(record.StepResult, record.MaxStepBytes) }, "exceeds the bounds", nil},
		"value of a step": {func(e entries) { e[key(f.later, 1)] = "nonsense" }, "malformed", func(e entries) {
			delete(e, key(f.later, 1))
			recorded(e, 1, both)
		}},
		"value of signals": {func(e entries) { e[key(f.later, keys.SignalsNumber)] = "nonsense" }, "malformed", func(e entries) {
			delete(e, key(f.later, keys.SignalsNumber))
			recorded(e, 2, record.HasCursors|record.Awaits)
		}},
		"value of cursors": {func(e entries) { e[key(f.later, keys.CursorsNumber)] = "nonsense" }, "malformed", func(e entries) {
			delete(e, key(f.later, keys.CursorsNumber))
			recorded(e, 2, record.HasSignals|record.Awaits)
		}},
	} {
		t.Run(name, func(t *testing.T) {
			damaged, want := maps.Clone(f.entries), maps.Clone(f.entries)
			c.damage(damaged)
			if c.want != nil {
				c.want(want)
			}
			disk := f.write(damaged)
			r, err := Verify(disk, "queue", testRules, false, false)
			require.NoError(t, err)
			require.NotEmpty(t, r.Problems)
			said := ""
			for _, p := range r.Problems {
				said += p.Text + "\n"
			}
			require.Contains(t, said, c.says)
			r, err = Verify(disk, "queue", testRules, true, false)
			require.NoError(t, err)
			require.NotEmpty(t, r.Problems)
			require.Equal(t, want, f.read(disk, "shard-000"))
		})
	}
}
