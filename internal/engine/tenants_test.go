package engine

import (
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"codeq/internal/ready"
)

// turnKept is a lane's time limit for the rest of its turn.
const turnKept = 10 * time.Minute

// sharded are shards of one process with a common countedTenants.
type sharded struct{ *ruled }

func newSharded(t *testing.T, shards int) sharded {
	return sharded{newRuled(t, Config{Shards: shards, SuspectFor: 60_000})}
}

// in selects a shard for the next operations.
func (s sharded) in(shard int) sharded {
	s.drivenShard = s.shards[shard]
	return s
}

// order returns the tenants of the next claims in their order, "-" for "".
func (s sharded) order(claims int) (tenants string) {
	for len(tenants) < claims {
		grants := s.claim("a", 1)
		require.Len(s, grants, 1)
		if tenants += grants[0].Tenant; grants[0].Tenant == "" {
			tenants += "-"
		}
	}
	return tenants
}

// isDrained reports whether memory knows that a tenant has no ready task.
func (s sharded) isDrained(tenant string) bool {
	l := s.Names.Queues["a"].lane(tenant, 0)
	return l == nil || s.Names.ready.Usage(&l.tasks).Complete && s.Names.ready.Usage(&l.tasks).Held == 0
}

// share is the weight of the shard for claims: 1 is the share of a tenant of weight 1 with one
// shard.
func (s sharded) share() float64 {
	f, ok := s.Names.First(s.Names.Queues["a"])
	require.True(s, ok)
	return float64(f.Share) / ready.WholeShare
}

// settleAll delivers the messages between the shards, and checks the shards.
func (s sharded) settleAll() {
	for again := true; again; {
		again = false
		for _, s.drivenShard = range s.shards {
			if s.under {
				s.end()
			}
			again = s.keepUp(s.drivenShard) > 0 || again
			s.take(s.drivenShard, func(int, *delivery, int) {})
			s.confirm(s.drivenShard)
			again = again || s.under
		}
	}
	for _, s.drivenShard = range s.shards {
		require.True(s, s.isAtRest())
		require.NoError(s, s.check(s.drivenShard))
	}
}

// TestTurnsOverShards: a tenant in fewer shards than the other tenants of its ring has a longer
// turn. The share of a shard is the sum of its tenants' shares.
func TestTurnsOverShards(t *testing.T) {
	s := newSharded(t, 4)
	s.in(0).produceFor("a", 0, 200, "A", "X", "C")
	require.Equal(t, "AXCAXC", s.in(0).order(6), "each has one shard")
	require.InDelta(t, 3, s.share(), 1e-9)

	s.in(1).produceFor("a", 0, 100, "A")
	s.in(2).produceFor("a", 0, 100, "A")
	s.in(3).produceFor("a", 0, 100, "A")
	s.in(1).produceFor("a", 0, 3, "C")
	s.in(2).produceFor("a", 0, 100, "C")
	require.Equal(t, "AXXXXCAXXXXCAXXXXCC", s.in(0).order(19), "A has four shards, C has three")
	require.InDelta(t, 1./4+1+1./3, s.share(), 1e-6)
	require.Equal(t, "AA", s.in(3).order(2))
	require.InDelta(t, 1./4, s.share(), 1e-6)
	s.settleAll()

	require.Equal(t, "ACACACAA", s.in(1).order(8)) // C has no more
	require.Equal(t, "AXXXXCC", s.in(0).order(7))
	require.InDelta(t, 1./4+1+1./2, s.share(), 1e-6)

	s.configure("a", `{"TenantWeights":{"A":3,"C":2}}`)
	require.InDelta(t, 3./4+1+2./2, s.share(), 1e-6, "at once")
	require.Equal(t, "AAAXXXXCCCC", s.order(11))
	s.settleAll()
}

// TestUnnamedTenantIsCounted: if there are other tenants in any shard, the table counts the tenant
// "" like them. Without other tenants, the tenant "" costs nothing.
func TestUnnamedTenantIsCounted(t *testing.T) {
	s := newSharded(t, 2)
	s.in(0).produceFor("a", 0, 100, "")
	s.in(1).produceFor("a", 0, 100, "")
	require.Empty(t, s.driver.tenants)
	s.in(0).produceFor("a", 0, 100, "X")
	require.Len(t, s.driver.tenants, 1)
	s.in(1).produceFor("a", 0, 1, "")
	for shard := range 2 { // shards learn of it as they publish their heads
		s.in(shard).order(2)
	}
	require.Len(t, s.driver.tenants, 2)
	require.Equal(t, "-XX-XX", s.in(0).order(6))
	require.InDelta(t, 1./2+1, s.share(), 1e-6)
	require.InDelta(t, 1./2, s.in(1).share(), 1e-6)
	s.settleAll()
}

// TestTenantsLeaveTheTable: tenants come and go, and no count outlives the last lane of its tenant.
func TestTenantsLeaveTheTable(t *testing.T) {
	s := sharded{newRuled(t, Config{Shards: 2, IdleLanes: 10})}
	for shard := range 2 {
		s.in(shard).produceFor("a", 0, 2, namesOf("tenant", 300)...)
	}
	require.Len(t, s.driver.tenants, 300)
	s.settleAll()
	for shard := range 2 {
		s.in(shard)
		s.complete(s.claim("a", 600)...)
		require.Len(t, s.driver.tenants, []int{300, 10}[shard], "the lanes that stay are of the same tenants")
	}
	s.settleAll()
	s.driver.crash()
	require.Empty(t, s.driver.tenants)
}

// TestTenantsAfterLoad: the table counts loaded tenants when memory has tasks of them.
func TestTenantsAfterLoad(t *testing.T) {
	s := newSharded(t, 4)
	for shard := range 4 {
		s.in(shard).produceFor("a", 0, 100, "A", "B")
	}
	s.in(0).produceFor("a", 0, 100, "X")
	s.driver.crash()
	require.Empty(t, s.driver.tenants)
	for shard := range 4 {
		require.InDelta(t, []float64{3, 2, 2, 2}[shard], s.in(shard).share(), 1e-9, "nothing is known yet")
		s.order(3)
	}
	s.in(0).order(6) // the rest of the turns
	require.Equal(t, "ABXXXXABXXXX", s.order(12))
	s.settleAll()
}

// TestTurnsBesideSuspects: suspects that wait for their start take no turns. A tenant with only
// such suspects in a shard has no share there until one of them starts.
func TestTurnsBesideSuspects(t *testing.T) {
	s := newSharded(t, 2)
	s.in(0).produceFor("a", 0, 50, "A", "Y")
	s.in(1).produceFor("a", 0, 50, "A")
	s.produceFor("a", 0, 1, "Y")
	for range 2 {
		s.begin(s.drivenShard)
		l, _ := s.Next(s.Names.Queues["a"], 0)
		_, err := s.Grant(l, 30_000, Holder{Local: true, Worker: "w"}, nil)
		require.NoError(t, err)
		s.end()
	}
	s.killed = true
	s.driver.crash()
	s.settleAll()
	s.in(1)
	require.NotZero(t, s.Names.Queues["a"].Suspects)
	require.Equal(t, "AA", s.order(2))
	s.in(0).order(4) // counts the tenants, and ends turns
	require.Equal(t, 4, strings.Count(s.order(6), "Y"), "Y has one shard, A has two")
	for range 2 {
		s.in(1).begin(s.drivenShard)
		require.True(t, s.Suspects.Start(s.Names.Queues["a"], func() bool { return true }))
		s.settleAll()
	}
	require.Equal(t, 1, strings.Count(s.in(1).order(4), "Y"))
	s.settleAll()
}

// TestTurnIsKept: a tenant with tasks that become ready one at a time gets all claims of its turn,
// and no more: with all its tasks in one shard, with tasks in some of the shards, and by its
// weight. A turn ends during a long absence.
func TestTurnIsKept(t *testing.T) {
	// trickle returns the tenants of the next claims, if X has one task before each of them.
	trickle := func(s sharded, claims int) (tenants string) {
		for range claims {
			if s.isDrained("X") {
				s.produceFor("a", 0, 1, "X")
			}
			tenants += s.order(1)
		}
		return tenants
	}
	t.Run("one of four shards", func(t *testing.T) {
		s := newSharded(t, 4)
		for shard := range 4 {
			s.in(shard).produceFor("a", 0, 100, "A", "B")
		}
		for shard := range 4 {
			s.in(shard).order(2)
		}
		require.Equal(t, "ABXXXXABXXXXABXXXX", trickle(s.in(0), 18))
		require.Equal(t, "ABXX", trickle(s, 4))
		s.pass(turnKept / 2)
		require.Equal(t, "ABAB", s.order(4), "as X has no task")
		require.Equal(t, "XXABXX", trickle(s, 6), "the rest of the turn, and a new one")
		require.Equal(t, "AB", s.order(2))
		s.pass(turnKept + 2*time.Second)
		require.Equal(t, "ABXXXXAB", trickle(s, 8), "a new turn")
		s.settleAll()
	})
	t.Run("three of four shards", func(t *testing.T) {
		s := newSharded(t, 4)
		for shard := range 4 {
			s.in(shard).produceFor("a", 0, 100, "A")
			if shard > 1 {
				s.produceFor("a", 0, 100, "X")
			}
		}
		for shard := range 4 {
			s.in(shard).order(2)
		}
		require.Equal(t, 8*4, strings.Count(trickle(s.in(0), 7*8), "X"), "four claims of X to three of A")
		s.settleAll()
	})
	t.Run("weight", func(t *testing.T) {
		s := newSharded(t, 1)
		s.configure("a", `{"TenantWeights":{"X":3}}`)
		s.produceFor("a", 0, 100, "A", "B")
		require.Equal(t, "ABXXXABXXXABXXX", trickle(s, 15))
		s.settleAll()
	})
	t.Run("two at a time", func(t *testing.T) { // before one in the middle of its turn
		s := newSharded(t, 1)
		s.configure("a", `{"TenantWeights":{"A":3,"X":2}}`)
		s.produceFor("a", 0, 100, "A", "B")
		s.order(4)
		s.produceFor("a", 0, 1, "X")
		require.Equal(t, "AAABXA", s.order(6))
		require.Equal(t, "XAABXXAAABXXAAAB", trickle(s, 16))
		s.settleAll()
	})
	t.Run("on disk", func(t *testing.T) {
		s := sharded{newRuled(t, Config{Shards: 1, WindowTasks: 4, WindowBytes: 4 << 10})}
		s.configure("a", `{"TenantWeights":{"X":3}}`)
		s.produceFor("a", 500, 40, "A", "B", "C", "D", "E")
		got := ""
		for range 64 {
			if s.isDrained("X") {
				s.produceFor("a", 500, 1, "X")
			}
			got += s.order(1)
		}
		require.Equal(t, 24, strings.Count(got, "X"), got)
		require.Equal(t, 8, strings.Count(got, "C"), got)
		s.settleAll()
	})
}
