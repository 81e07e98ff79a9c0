package record

import (
	"fmt"
	"math"
	"reflect"
	"strconv"
	"time"
	"unicode/utf8"

	"codeq/internal/base"
)

// Settings are the settings of a queue.
type Settings struct {
	Paused            bool           `json:",omitzero"`
	Concurrency       int            `json:",omitzero"`
	ConcurrencyPerKey int            `json:",omitzero"`
	Rate              float64        `json:",omitzero"`
	Burst             int            `json:",omitzero"`
	TenantWeights     map[string]int `json:",omitempty"`
	Retention         time.Duration  `json:",omitzero"`
	DeadRetention     time.Duration  `json:",omitzero"`
	HoldGroups        bool           `json:",omitzero"`
}

// IsZero reports whether the settings have no value.
func (s *Settings) IsZero() bool { return reflect.DeepEqual(*s, Settings{}) }

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
	for _, f := range []struct {
		field string
		value time.Duration
	}{{"Settings.Retention", s.Retention}, {"Settings.DeadRetention", s.DeadRetention}} {
		if f.value < 0 && f.value != forever {
			return base.NewInvalid(f.field, f.value, "0 or more, or Forever")
		}
	}
	return nil
}

// forever is a retention without end.
const forever time.Duration = -1

// Weight is how many claims in a row a tenant gets.
func (s *Settings) Weight(tenant string) int32 {
	if s.TenantWeights == nil {
		return 1
	}
	return int32(max(1, s.TenantWeights[tenant]))
}
