package record

import (
	"fmt"
	"maps"
	"math"
	"reflect"
	"strconv"
	"time"
	"unicode/utf8"

	"codeq/internal/base"
)

// Policy is how tasks are tried, as codeq.Policy describes it.
type Policy struct {
	MaxAttempts int           `json:",omitzero"`
	Backoff     base.Backoff  `json:",omitzero"`
	Timeout     time.Duration `json:",omitzero"`
	Retention   time.Duration `json:",omitzero"`
	RetryFirst  bool          `json:",omitzero"`
}

// Settings are the settings of a queue.
type Settings struct {
	Paused            bool           `json:",omitzero"`
	Concurrency       int            `json:",omitzero"`
	ConcurrencyPerKey int            `json:",omitzero"`
	Rate              float64        `json:",omitzero"`
	Burst             int            `json:",omitzero"`
	TenantWeights     map[string]int `json:",omitempty"`
	Policy
	DeadRetention   time.Duration `json:",omitzero"`
	HoldGroups      bool          `json:",omitzero"`
	DeadLetterQueue string        `json:",omitzero"`
}

// IsZero reports whether the settings have no value.
func (s *Settings) IsZero() bool { return reflect.DeepEqual(*s, Settings{}) }

// HasPolicy reports whether the settings have what those of format 7 do not.
func (s *Settings) HasPolicy() bool {
	p := s.Policy
	p.Retention = 0
	return p != Policy{} || s.DeadLetterQueue != ""
}

// Declare gives the settings the values of a declaration, but for Paused. It reports whether that
// changes them.
func (s *Settings) Declare(declared *Settings) (changed bool) {
	before := *s
	*s = *declared
	s.Paused, s.TenantWeights = before.Paused, maps.Clone(s.TenantWeights)
	if len(s.TenantWeights) == 0 {
		s.TenantWeights = nil
	}
	return !reflect.DeepEqual(*s, before)
}

// BurstSize is how many tasks may be claimed at once, by a rate.
func (s *Settings) BurstSize() int {
	if s.Burst > 0 {
		return s.Burst
	}
	return max(1, int(math.Ceil(s.Rate)))
}

// MaxWeight bounds the weight of a tenant, or of a queue in a claim: the sum of the weights of any
// list fits in an int.
const MaxWeight = 1 << 16

// Check returns a *base.Invalid for settings that are not allowed.
func (s *Settings) Check() error {
	for _, f := range []struct {
		field string
		value int
	}{
		{"Settings.Concurrency", s.Concurrency},
		{"Settings.ConcurrencyPerKey", s.ConcurrencyPerKey},
		{"Settings.Burst", s.Burst},
	} {
		if f.value < 0 || f.value > math.MaxInt32 {
			return base.NewInvalid(f.field, f.value, "0 to 2^31-1")
		}
	}
	if !(s.Rate >= 0 && s.Rate <= 1e9) {
		return base.NewInvalid("Settings.Rate", s.Rate, "0 to 1e9")
	}
	for tenant, w := range s.TenantWeights {
		if !utf8.ValidString(tenant) { // they are stored as JSON
			return base.NewInvalid("Settings.TenantWeights", strconv.Quote(tenant), "names in UTF-8")
		}
		if w < 1 || w > MaxWeight {
			return base.NewInvalid("Settings.TenantWeights of "+tenant, w, fmt.Sprint("1 to ", MaxWeight))
		}
	}
	if !utf8.ValidString(s.DeadLetterQueue) || len(s.DeadLetterQueue) > maxQueueName {
		return base.NewInvalid("Settings.DeadLetterQueue", strconv.Quote(s.DeadLetterQueue), "the name of a queue")
	}
	if err := checkRetention("Settings.DeadRetention", s.DeadRetention); err != nil {
		return err
	}
	return s.Policy.Check("Settings")
}

// CheckFor is Check for a queue, in a process that has a limit of names.
func (s *Settings) CheckFor(queue string, maxName int) error {
	if s.DeadLetterQueue != "" && (s.DeadLetterQueue == queue || len(s.DeadLetterQueue) > maxName) {
		limit := fmt.Sprintf("another queue, at most %d bytes", maxName)
		return base.NewInvalid("Settings.DeadLetterQueue", strconv.Quote(s.DeadLetterQueue), limit)
	}
	return s.Check()
}

// CheckDeclared is CheckFor for settings to declare, and the name of their queue.
func (s *Settings) CheckDeclared(queue string, maxName int) error {
	if queue == "" || len(queue) > maxName || !utf8.ValidString(queue) {
		return base.NewInvalid("queue", strconv.Quote(queue), fmt.Sprintf("a name in UTF-8, at most %d bytes", maxName))
	}
	if s.Paused {
		return base.NewInvalid("Settings.Paused", true, "false; see Queue.Pause")
	}
	return s.CheckFor(queue, maxName)
}

// Check returns a *base.Invalid, with a field of a struct, for a policy that is not allowed.
func (p *Policy) Check(of string) error {
	if p.MaxAttempts < 0 || p.MaxAttempts > math.MaxInt32 {
		return base.NewInvalid(of+".MaxAttempts", p.MaxAttempts, "0 to 2^31-1")
	}
	if p.Timeout < 0 {
		return base.NewInvalid(of+".Timeout", p.Timeout, "0 or more")
	}
	if p.Backoff != (base.Backoff{}) {
		b := p.Backoff
		if field, value, limit := b.SetDefaults(); limit != "" {
			return base.NewInvalid(of+".Backoff"+field, value, limit)
		}
		if math.IsInf(p.Backoff.Factor, 0) || math.IsInf(p.Backoff.Jitter, 0) { // JSON has none
			return base.NewInvalid(of+".Backoff", p.Backoff, "finite numbers")
		}
	}
	return checkRetention(of+".Retention", p.Retention)
}

func checkRetention(field string, d time.Duration) error {
	if d < 0 && d != forever {
		return base.NewInvalid(field, d, "0 or more, or Forever")
	}
	return nil
}

// Delay returns the wait after an attempt, as the policy says; ok is false if it does not.
func (p *Policy) Delay(attempt int, chance float64) (wait time.Duration, ok bool) {
	if p.Backoff == (base.Backoff{}) {
		return 0, false
	}
	b := p.Backoff
	b.SetDefaults()
	return b.Delay(attempt, chance), true
}

// Kept returns the retention, ms; 0: none is set. p may be nil.
func (p *Policy) Kept() int64 {
	if p == nil {
		return 0
	}
	return Retention(p.Retention)
}

// RunFor returns the timeout; other, ms, if none is set. p may be nil.
func (p *Policy) RunFor(other uint64) time.Duration {
	if p == nil || p.Timeout == 0 {
		return Duration(other)
	}
	return p.Timeout
}

// maxQueueName bounds the stored name of a queue; Limits.Name of a process may be lower.
const maxQueueName = 4096

// forever is a retention without end.
const forever time.Duration = -1

// Weight is how many claims in a row a tenant gets.
func (s *Settings) Weight(tenant string) int32 {
	if s.TenantWeights == nil {
		return 1
	}
	return int32(max(1, s.TenantWeights[tenant]))
}
