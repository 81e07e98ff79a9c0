package codeqweb

import (
	"fmt"
	"maps"
	"math"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"

	"codeq"
)

// settingField is a field of the form of settings: text formats the setting, set changes it.
type settingField struct {
	name string
	text func(*codeq.Settings) string
	set  func(s *codeq.Settings, p url.Values, name string) error

	isCheckbox bool
}

// settingFields lists the fields. The form has the original text of each as "was-" and the name, so
// that edited fields are known.
var settingFields = []settingField{
	intField("concurrency", func(s *codeq.Settings) *int { return &s.Concurrency }),
	intField("concurrency-per-key", func(s *codeq.Settings) *int { return &s.ConcurrencyPerKey }),
	floatField("rate", "a number of tasks a second", func(s *codeq.Settings) *float64 { return &s.Rate }),
	intField("burst", func(s *codeq.Settings) *int { return &s.Burst }),
	durationField("retention", func(s *codeq.Settings) *time.Duration { return &s.Retention }),
	durationField("dead-retention", func(s *codeq.Settings) *time.Duration { return &s.DeadRetention }),
	intField("max-attempts", func(s *codeq.Settings) *int { return &s.MaxAttempts }),
	durationField("timeout", func(s *codeq.Settings) *time.Duration { return &s.Timeout }),
	durationField("backoff-base", func(s *codeq.Settings) *time.Duration { return &s.Backoff.Base }),
	durationField("backoff-max", func(s *codeq.Settings) *time.Duration { return &s.Backoff.Max }),
	durationField("backoff-step", func(s *codeq.Settings) *time.Duration { return &s.Backoff.Step }),
	floatField("backoff-factor", "a number of 1 or more", func(s *codeq.Settings) *float64 { return &s.Backoff.Factor }),
	{"dead-letter-queue", func(s *codeq.Settings) string { return s.DeadLetterQueue }, func(s *codeq.Settings, p url.Values, name string) error {
		s.DeadLetterQueue = p.Get(name)
		return nil
	}, false},
	checkbox("retry-first", func(s *codeq.Settings) *bool { return &s.RetryFirst }),
	checkbox("hold-groups", func(s *codeq.Settings) *bool { return &s.HoldGroups }),
	{"tenant-weights", weightsText, setWeights, false},
}

// checkbox is a field that a browser does not send if it is not checked.
func checkbox(name string, of func(*codeq.Settings) *bool) settingField {
	return settingField{name, func(s *codeq.Settings) string { return strconv.FormatBool(*of(s)) }, func(s *codeq.Settings, p url.Values, name string) error {
		*of(s) = p.Get(name) == "true"
		return nil
	}, true}
}

func intField(name string, of func(*codeq.Settings) *int) settingField {
	return settingField{name, func(s *codeq.Settings) string { return strconv.Itoa(*of(s)) }, func(s *codeq.Settings, p url.Values, name string) (err error) {
		if *of(s) = 0; p.Get(name) != "" {
			*of(s), err = intParam(p, name)
		}
		return err
	}, false}
}

func floatField(name, allowed string, of func(*codeq.Settings) *float64) settingField {
	text := func(s *codeq.Settings) string { return strconv.FormatFloat(*of(s), 'g', -1, 64) }
	return settingField{name, text, func(s *codeq.Settings, p url.Values, name string) (err error) {
		if *of(s) = 0; p.Get(name) == "" {
			return nil
		}
		if *of(s), err = strconv.ParseFloat(p.Get(name), 64); err != nil || math.IsNaN(*of(s)) {
			return invalid(name, allowed)
		}
		return nil
	}, false}
}

func durationField(name string, of func(*codeq.Settings) *time.Duration) settingField {
	text := func(s *codeq.Settings) string {
		switch d := *of(s); {
		case d == 0:
			return ""
		case d < 0:
			return "forever"
		default:
			return d.String()
		}
	}
	return settingField{name, text, func(s *codeq.Settings, p url.Values, name string) (err error) {
		*of(s), err = durationParam(p, name)
		return err
	}, false}
}

func weightsText(s *codeq.Settings) (text string) {
	for _, tenant := range slices.Sorted(maps.Keys(s.TenantWeights)) {
		text += fmt.Sprintf("%s=%d\n", tenant, s.TenantWeights[tenant])
	}
	return text
}

func setWeights(s *codeq.Settings, p url.Values, name string) error {
	s.TenantWeights = nil
	for text := range strings.SplitSeq(p.Get(name), "\n") {
		if text == "" {
			continue
		}
		at := strings.LastIndexByte(text, '=') // a name may also contain one
		weight, err := strconv.Atoi(strings.TrimSpace(text[at+1:]))
		if at < 0 || err != nil {
			return invalid(name, "lines of the form tenant=weight")
		}
		if s.TenantWeights == nil {
			s.TenantWeights = make(map[string]int)
		}
		s.TenantWeights[text[:at]] = weight
	}
	return nil
}

// settingsForm changes the edited settings of a form. The others stay.
func (d *Dashboard) settingsForm(w http.ResponseWriter, r *request) error {
	p := r.params
	queue := p.Get("queue")
	var refused error
	err := d.q.Configure(r.Context(), queue, func(s *codeq.Settings) {
		next := *s
		if refused = changeSettings(&next, p); refused == nil {
			*s = next
		}
	})
	if err == nil {
		err = refused
	}
	d.audited(r, p, err, false)
	if err != nil {
		return err
	}
	d.back(w, r, "settings", "")
	return nil
}

// changeSettings applies the edited fields of a form. Missing and unedited fields leave their
// settings alone, so that a form does not undo a concurrent change.
func changeSettings(s *codeq.Settings, p url.Values) error {
	for _, f := range settingFields {
		was, known := sent(p, "was-"+f.name)
		text, changed := sent(p, f.name)
		if f.isCheckbox && known && !changed {
			text, changed = "false", true
		}
		now := f.text(s)
		switch {
		case !changed || known && text == was || text == now:
			continue
		case known && now != was:
			return &refusal{http.StatusConflict, "conflict", fmt.Sprintf(
				"%s has become %q meanwhile; the form had %q: nothing was changed, look at the page again", f.name, now, was)}
		}
		if err := f.set(s, url.Values{f.name: {text}}, f.name); err != nil {
			return err
		}
	}
	return nil
}

// sent returns a field of a form, without the carriage returns that a browser adds.
func sent(p url.Values, name string) (text string, has bool) {
	return strings.ReplaceAll(p.Get(name), "\r", ""), p.Has(name)
}

// durationParam reads a duration such as 1h30m, 7d or forever; "": 0.
func durationParam(p url.Values, name string) (time.Duration, error) {
	text := strings.TrimSpace(p.Get(name))
	if text == "" {
		return 0, nil
	}
	if text == "forever" {
		return codeq.Forever, nil
	}
	if days, ok := strings.CutSuffix(text, "d"); ok {
		if n, err := strconv.Atoi(days); err == nil && n >= 0 && n < 100_000 {
			return time.Duration(n) * 24 * time.Hour, nil
		}
	}
	d, err := time.ParseDuration(text)
	if err != nil || d < 0 {
		return 0, invalid(name, "a duration such as 90s, 1h30m or 7d, or forever")
	}
	return d, nil
}
