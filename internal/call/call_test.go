package call

import (
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"codeq/internal/base"
	"codeq/internal/engine"
	"codeq/internal/keys"
	"codeq/internal/record"
	"codeq/internal/recurrence"
	"codeq/internal/wire"
)

var (
	id, other = keys.ID{1, 15: 2}, keys.ID{3, 15: 4}
	receipt   = engine.Receipt{ID: id, Token: 1 << 40}
)

// schedules is a part of the schedules. Each is shown as its name.
type schedules struct{ Schedules[string] }

func (*schedules) Decide(*engine.State) (engine.Verdict, error) { return engine.Decided, nil }

// requireCutShort requires that read refuses every truncated message.
func requireCutShort(t *testing.T, message []byte, read func(*wire.Reader)) {
	t.Helper()
	for n := range message {
		r := wire.NewReader(message[:n])
		read(r)
		require.Error(t, r.Done(), "%d of %d bytes", n, len(message))
	}
}

// TestBodies: a call has the same content at the node that decides it, and its answer has the same
// content at the calling node. After Again, the call can be sent and answered once more, with the
// same outcome.
func TestBodies(t *testing.T) {
	every := keys.ScheduleValue{Start: 5, Every: 300, Queue: "q", Record: []byte("record")}
	times, err := recurrence.Of(&every)
	require.NoError(t, err)
	lost := []error{engine.LeaseLost(receipt, true), engine.LeaseLost(engine.Receipt{ID: other}, false)}
	require.ErrorIs(t, lost[0], base.ErrCanceled)
	require.NotErrorIs(t, lost[1], base.ErrCanceled)
	counts := []engine.QueueCounts{{Queue: "q", Counts: keys.Counts{Ready: 1, Leased: 2, Scheduled: 3, Blocked: 4, Done: 5, Dead: 6, Canceled: 7}}, {Queue: ""}}
	cursor := engine.InfoCursor{CountsCursor: engine.CountsCursor{Next: 5, Begun: 6}, Queue: "q", Lanes: 300, Oldest: 1 << 40}
	infos := []engine.QueueInfo{{Queue: "q", Counts: counts[0].Counts, Oldest: 1 << 40, Totals: keys.Totals{1, 2, 300}, Settings: []byte("s")}, {}}
	for _, c := range []struct {
		asked, answered, blank Body // with the arguments; with the answer, too
		rest                   bool // the answer is the rest of the message
	}{
		{asked: &Alter{ID: id, How: engine.AlterMove, AlterTo: engine.AlterTo{Arg: 1 << 40, Step: "charge"}}, blank: &Alter{}},
		{asked: &Signal{ID: id, Name: "s", Value: []byte("v")}, blank: &Signal{}},
		{asked: &ReleaseKey{Hash: keys.UniqueHash("q", "", "", "", "k"), Key: "k"}, blank: &ReleaseKey{}},
		{
			asked:    &Renew{Receipts: []engine.Receipt{receipt, {ID: other}}, Duration: 1000},
			answered: &Renew{Receipts: []engine.Receipt{receipt, {ID: other}}, Duration: 1000, Lost: []engine.Receipt{receipt, {ID: other}}, Errs: lost},
			blank:    &Renew{},
		},
		{
			asked: &AlterMany{engine.BulkAlteration{
				IDs: []keys.ID{{1}, {2}}, How: engine.AlterMove, States: record.SetOf(engine.Ready, engine.Canceled), AlterTo: engine.AlterTo{Arg: 7, Queue: "q"},
			}},
			answered: &AlterMany{engine.BulkAlteration{
				IDs: []keys.ID{{1}, {2}}, How: engine.AlterMove, States: record.SetOf(engine.Ready, engine.Canceled), AlterTo: engine.AlterTo{Arg: 7, Queue: "q"}, N: 1, Failed: 1,
			}},
			blank: &AlterMany{},
		},
		{asked: &Settings{Queue: "q"}, answered: &Settings{Queue: "q", Value: []byte("v")}, blank: &Settings{}, rest: true},
		{asked: &Configure{Queue: "q", Value: []byte("v")}, answered: &Configure{Queue: "q", Value: []byte("v"), Late: true}, blank: &Configure{}},
		{asked: &Adopt{Queue: "q", Value: []byte("v")}, blank: &Adopt{}},
		{asked: &SetSchedule{Name: "s", Value: every, Times: times}, blank: &SetSchedule{}},
		{asked: &DeleteSchedule{Name: "s"}, blank: &DeleteSchedule{}},
		{asked: &PauseSchedule{Name: "s", Paused: true}, blank: &PauseSchedule{}},
		{
			asked:    &schedules{Schedules[string]{After: "a"}},
			answered: &schedules{Schedules[string]{After: "c", More: true, Infos: []string{"b", "c"}}},
			blank:    &schedules{}, rest: true,
		},
		{
			asked:    &Stats{CountsCursor: engine.CountsCursor{Next: 5, Begun: 6}},
			answered: &Stats{CountsCursor: engine.CountsCursor{Unnumbered: true, Next: 7, Begun: 6}, Counts: counts, More: true, Queues: 9},
			blank:    &Stats{},
		},
		{
			asked:    &Info{InfoCursor: cursor, Settings: true},
			answered: &Info{InfoCursor: engine.InfoCursor{CountsCursor: engine.CountsCursor{Unnumbered: true}}, Settings: true, More: true, Infos: infos},
			blank:    &Info{},
		},
		{asked: &Totals{Names: []string{"q", ""}}, answered: &Totals{Names: []string{"q", ""}, Infos: infos}, blank: &Totals{}},
		{
			asked:    &Days{Queue: "q"},
			answered: &Days{Queue: "q", Days: []keys.TotalsValue{{Day: 1, All: keys.Totals{7: 300}, OfDay: keys.Totals{7: 299}}, {Day: 2}}},
			blank:    &Days{},
		},
	} {
		t.Run(fmt.Sprintf("%T", c.asked), func(t *testing.T) {
			if c.answered == nil { // without an answer, the call stays unchanged
				c.answered = c.asked
			}
			sent := c.asked.Append(nil)
			next := func(b Body) {
				if b, ok := b.(interface{ next() }); ok { // each answer is a part
					b.next()
				}
			}
			next(c.asked)
			requireCutShort(t, sent, c.blank.Read)
			fresh := c.blank
			r := wire.NewReader(sent)
			fresh.Read(r)
			require.NoError(t, r.Done())
			next(fresh)
			require.Equal(t, c.asked, fresh)

			answer := c.answered.AppendReply(nil)
			if !c.rest {
				requireCutShort(t, answer, func(r *wire.Reader) { fresh.Again(); fresh.ReadReply(r) })
			}
			for range 2 {
				fresh.Again()
				require.Equal(t, sent, fresh.Append(nil))
				r = wire.NewReader(answer)
				fresh.ReadReply(r)
				require.NoError(t, r.Done())
				require.Equal(t, answer, fresh.AppendReply(nil))
			}
			if _, ok := fresh.(interface{ next() }); !ok { // its part has a beginning
				require.Equal(t, c.answered, fresh)
			}
		})
	}
}

// TestUnknownAlteration: an alteration that this version does not know is refused.
func TestUnknownAlteration(t *testing.T) {
	for _, how := range []engine.Alteration{3, engine.AlterMove + 1} {
		for _, b := range []Body{&Alter{How: how}, &AlterMany{engine.BulkAlteration{How: how}}} {
			r := wire.NewReader(b.Append(nil))
			b.Read(r)
			require.Error(t, r.Done())
		}
	}
}

// TestScheduleWithoutTimes: an invalid schedule, or one without times, is refused.
func TestScheduleWithoutTimes(t *testing.T) {
	for _, v := range []keys.ScheduleValue{{Cron: "nonsense"}, {Cron: "@daily", TimeZone: "Nowhere/" + time.Local.String()}} {
		r := wire.NewReader((&SetSchedule{Name: "s", Value: v}).Append(nil))
		new(SetSchedule).Read(r)
		require.Error(t, r.Done())
	}
}
