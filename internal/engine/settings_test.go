package engine

import (
	"encoding/json"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"codeq/internal/base"
	"codeq/internal/keys"
	"codeq/internal/record"
	"codeq/internal/testbase"
)

// FuzzSettings: the parser refuses stored settings, or they are valid for Configure, and another
// encoding and parse give the same settings.
func FuzzSettings(f *testing.F) {
	for _, set := range []record.Settings{
		{},
		{Paused: true, Concurrency: 3, Rate: 0.5, Burst: 2, TenantWeights: map[string]int{"t": 2}},
		{ConcurrencyPerKey: 1, Policy: record.Policy{MaxAttempts: 3, Retention: -1, RetryFirst: true}, DeadRetention: time.Hour, HoldGroups: true},
	} {
		value, err := json.Marshal(set)
		require.NoError(f, err)
		f.Add(value)
		f.Add(keys.SettingsValue{Version: 300, JSON: value}.Append(nil))
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		var c Configured
		var err error
		testbase.BoundDecode(t, len(b), func() { c, err = ParseSettings(b) })
		if err != nil {
			return
		}
		require.NoError(t, c.Settings.Check())
		require.Positive(t, c.Settings.BurstSize())
		value, err := json.Marshal(c.Settings)
		require.NoError(t, err)
		again, err := ParseSettings(keys.SettingsValue{Version: c.Version, JSON: value}.Append(nil))
		require.NoError(t, err)
		require.Equal(t, c.Version, again.Version)
		after, err := json.Marshal(again.Settings)
		require.NoError(t, err)
		require.Equal(t, string(value), string(after))
	})
}

// TestRemovedSettings: after a pause and a resume of thirty thousand queues, only one version is
// left in memory and on disk. The next settings exceed this version, also after Open.
func TestRemovedSettings(t *testing.T) {
	t.Parallel()
	r := newRuled(t, Config{})
	set := func(queue string, version uint64, settings string) (late bool) {
		r.in(func() (_ Verdict, err error) {
			late, err = r.Configure(queue, keys.SettingsValue{Version: version, JSON: []byte(settings)}.Append(nil))
			return Decided, err
		})
		return late
	}
	version := uint64(1)
	for i, queue := range namesOf("queue", 30_000) {
		require.False(t, set(queue, version, `{"Paused":true}`))
		require.False(t, set(queue, version+1, `{}`))
		if version += 2; i%1000 == 0 {
			r.settle()
		}
	}
	r.settle()
	for range 2 {
		require.Empty(t, r.Names.Queues)
		require.Equal(t, 1, r.stored(keys.Settings))
		require.EqualValues(t, 60_000, r.Names.Given)
		require.LessOrEqual(t, r.Names.settled.Len(), 1001, "places of queues that have settings are used again")
		require.True(t, set("a", 1, `{"Paused":true}`))
		require.True(t, set("a", 60_000, `{"Paused":true}`))
		r.settle()
		r.reopen()
	}
	require.False(t, set("a", 60_001, `{"Paused":true}`))
	r.settle()
	require.Len(t, r.Names.Queues, 1)

	// A queue that has settings goes on with its own versions.
	require.False(t, set("b", 60_001, `{"Paused":true}`))
	require.False(t, set("a", 60_002, `{}`))
	require.False(t, set("b", 60_002, `{"Rate":1}`))
	require.False(t, set("b", 60_003, `{}`))
	require.False(t, set("b", 60_004, `{"Rate":1}`))
	r.settle()
}

// TestGoneQueue: a queue that was deleted is not shown by a shard that does not yet have the first
// shard's message: neither its settings nor its former tasks show it.
func TestGoneQueue(t *testing.T) {
	t.Parallel()
	r := newRuled(t, Config{})
	adopt := func(version uint64, settings string) {
		r.in(func() (Verdict, error) {
			return Decided, r.Names.Adopt("a", keys.SettingsValue{Version: version, JSON: []byte(settings)}.Append(nil))
		})
		r.settle()
	}
	shown := func() int {
		info, more, _ := r.Names.Info(new(InfoCursor), 100, nil)
		require.False(t, more)
		counts, _ := r.Names.Counts(new(CountsCursor), 100, nil)
		require.LessOrEqual(t, len(counts), len(info), "Stats shows no queue that Info does not")
		return len(info)
	}
	r.produceFor("a", 0, 1, "")
	r.complete(r.claim("a", 1)...)
	r.settle()
	require.Equal(t, 1, shown(), "a short while ago it had a task")
	adopt(1, string(keys.DeleteQueue))
	require.Zero(t, shown())
	adopt(2, `{"Paused":true}`)
	require.Equal(t, 1, shown())
	adopt(3, string(keys.DeleteQueue))
	require.Zero(t, shown())
	r.reopen()
	require.Zero(t, shown())
}

// TestLateInterest: a message that a node sent before the stored one changes nothing.
func TestLateInterest(t *testing.T) {
	t.Parallel()
	r := newRuled(t, Config{})
	send := func(kinds KindSet, life, number uint64) {
		r.in(func() (Verdict, error) {
			r.Mail.SetInterest("n", keys.InterestValue{Kinds: uint64(kinds), Incarnation: life, Number: number}, false)
			return Decided, nil
		})
		r.settle()
	}
	send(3, 5, 2)
	send(0, 5, 1)
	require.EqualValues(t, 3, r.Mail.Interested)
	r.reopen()
	send(0, 4, 9)
	send(7, 5, 1)
	require.EqualValues(t, 3, r.Mail.Interested)
	require.Equal(t, 1, r.stored(keys.Interest))
	send(0, 6, 1)
	send(3, 5, 3)
	require.Zero(t, r.Mail.Interested)
	require.Zero(t, r.stored(keys.Interest))
}

// TestPoliciesNeedTheirFormat: a shard of an older format takes no policies, as nodes of an older
// version would drop them.
func TestPoliciesNeedTheirFormat(t *testing.T) {
	t.Parallel()
	r := newRuled(t, Config{})
	r.Format = keys.FormatOfSteps - 1
	for settings, want := range map[string]error{`{"MaxAttempts":1}`: base.ErrFormat, `{"Retention":1}`: nil} {
		r.in(func() (Verdict, error) {
			_, err := r.Configure("a", keys.SettingsValue{Version: 1, JSON: []byte(settings)}.Append(nil))
			require.ErrorIs(t, err, want)
			return Decided, nil
		})
	}
}
