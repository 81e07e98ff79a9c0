package codeqweb_test

import (
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"codeq"
	"codeq/codeqweb"
)

// usage is what tasks take, in the JSON form.
type usage struct {
	Tasks, Read int
	Groups      []usageOf
	Largest     []struct {
		ID              codeq.ID
		Queue           string
		Payload, Result int
	}
}

type usageOf struct {
	Queue       string
	State       codeq.State
	Tasks, Read int
	Bytes       int
	First, Last time.Time
	Ends        bool
}

func (s *site) usage() (u usage) {
	s.t.Helper()
	require.Equal(s.t, http.StatusOK, s.api(http.MethodGet, "usage", "", &u))
	return u
}

func (u *usage) of(t *testing.T, queue string, state codeq.State) usageOf {
	t.Helper()
	i := slices.IndexFunc(u.Groups, func(g usageOf) bool { return g.Queue == queue && g.State == state })
	require.GreaterOrEqual(t, i, 0, "%+v", u.Groups)
	return u.Groups[i]
}

// TestUsage: the page of storage shows what takes the disk by queue and state, the largest payloads
// without their contents, and when kept tasks are deleted.
func TestUsage(t *testing.T) {
	s := open(t, codeq.Options{Shards: 2, Retention: time.Hour}, as(codeqweb.Read))
	ctx := t.Context()
	require.NoError(t, s.q.Configure(ctx, "days", func(set *codeq.Settings) { set.DeadRetention = 24 * time.Hour }))
	large := s.produce(codeq.Task{Queue: "big", Payload: []byte(strings.Repeat("secret", 50_000))})
	for i := range 30 {
		s.produce(codeq.Task{Queue: "small", Payload: make([]byte, 1000+i), RunAt: time.Now().Add(time.Duration(i%2) * time.Hour)})
	}
	for range 2 {
		s.dead(codeq.Task{Queue: "days"}, "it fails")
		s.dead(codeq.Task{Queue: "ever"}, "it fails")
		s.produce(codeq.Task{Queue: "mail"})
		require.NoError(t, s.q.Complete(ctx, s.claim("mail").Receipt, make([]byte, 5000)))
	}
	last := s.produce(codeq.Task{Queue: "mail", Retention: 5 * time.Hour})
	require.NoError(t, s.q.Complete(ctx, s.claim("mail").Receipt, nil))

	u := s.usage()
	require.Equal(t, 38, u.Tasks)
	require.Equal(t, 38, u.Read)
	require.Equal(t, "big", u.Groups[0].Queue, "the largest first")
	require.InDelta(t, 300_000, u.of(t, "big", codeq.Ready).Bytes, 1000)
	for _, state := range []codeq.State{codeq.Ready, codeq.Scheduled} {
		g := u.of(t, "small", state)
		require.Equal(t, 15, g.Tasks)
		require.Equal(t, 15, g.Read)
		require.InDelta(t, 15*1037, g.Bytes, 15*100)
	}
	require.Len(t, u.Largest, 20)
	require.Equal(t, large, u.Largest[0].ID)
	require.Equal(t, 300_000, u.Largest[0].Payload)
	require.Equal(t, 5000, u.Largest[1].Result)
	require.Equal(t, 1029, u.Largest[3].Payload)
	require.Equal(t, 1013, u.Largest[19].Payload)

	soon := func(at time.Time, kept time.Duration) {
		t.Helper()
		require.WithinRange(t, at, time.Now().Add(kept-time.Minute), time.Now().Add(kept+kept/8))
	}
	g := u.of(t, "mail", codeq.Done)
	require.True(t, g.Ends)
	soon(g.First, time.Hour)
	soon(g.Last, 5*time.Hour)
	require.WithinDuration(t, s.task(last).Until, g.Last, time.Second)
	g = u.of(t, "days", codeq.Dead)
	soon(g.First, 24*time.Hour)
	soon(g.Last, 24*time.Hour)
	g = u.of(t, "ever", codeq.Dead)
	require.True(t, g.Ends)
	require.Zero(t, g.First)

	page := s.get("/storage")
	require.Contains(t, page, "All 38 tasks were read")
	require.Regexp(t, `(?s)<td class="num" data-label="Tasks">1</td><td class="num" data-label="Size">293.0 KiB</td>`, row(t, page, `data-usage="big ready"`))
	require.Contains(t, row(t, page, `id="largest"`), "Payload")
	require.Contains(t, row(t, page, `data-task="`+large.String()+`"`), `<td class="num" data-label="Payload">293.0 KiB</td>`)
	require.Regexp(t, `in 6\d min</time></td><td data-label="The last one"><time .*in [45]\.\d h</time>`, row(t, page, `data-freed="mail done"`))
	require.Contains(t, row(t, page, `data-freed="ever dead"`), `<td data-label="The first one is deleted">never</td><td data-label="The last one">never</td>`)
	require.NotContains(t, page, `data-freed="small`)
	require.NotContains(t, page, "secret")
	require.Contains(t, page, "Compactions have nothing to free")
}

// TestUsageOfMany: of many tasks some are read, from both ends, and the page says so.
func TestUsageOfMany(t *testing.T) {
	t.Parallel()
	s := open(t, codeq.Options{Shards: 1}, nil)
	for i := range 30 {
		_, err := s.q.ProduceBatch(t.Context(), slices.Repeat([]codeq.Task{{Queue: "many", Payload: make([]byte, 100+400*(i/15))}}, 1000))
		require.NoError(t, err)
	}
	for range 3 {
		s.produce(codeq.Task{Queue: "few", Payload: make([]byte, 50)})
	}
	begin := time.Now()
	u := s.usage()
	t.Log("read", u.Read, "in", time.Since(begin))
	require.Equal(t, 30_003, u.Tasks)
	require.LessOrEqual(t, u.Read, 20_000)
	few, many := u.of(t, "few", codeq.Ready), u.of(t, "many", codeq.Ready)
	require.Equal(t, 3, few.Read, "a small queue is read, too")
	require.Equal(t, 30_000, many.Tasks)
	require.Less(t, many.Read, many.Tasks)
	require.InEpsilon(t, 30_000*(300+30), many.Bytes, 0.1)
	page := s.get("/storage")
	require.Regexp(t, `Estimated from [\d,]+ of 30,003 tasks, the first and the last ones of each queue and state`, page)
	require.Regexp(t, `<td class="num" data-label="Tasks">30,000</td><td class="num" data-label="Size">about 9\.\d MiB</td>`, row(t, page, `data-usage="many ready"`))
}
