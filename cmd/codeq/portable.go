package main

import (
	"fmt"
	"reflect"
	"strings"
	"time"
	"unicode/utf8"

	"codeq"
	"codeq/internal/heldkeys"
)

// portableVersion is that of the lines that export writes. Import also reads version 1, in which
// there are no keys.
const portableVersion = 2

// portable is a line of an export, a JSON object with one of its fields. The order of the lines is
// that in which import can make the tasks: see portable's stage.
type portable struct {
	Header   *portableHeader     `json:",omitempty"` // the first line
	Settings *portableSettings   `json:",omitempty"` // the second to the last-but-tasks
	Schedule *codeq.ScheduleInfo `json:",omitempty"`
	Key      *portableKey        `json:",omitempty"` // before the tasks
	Task     *portableTask       `json:",omitempty"`
	End      *portableEnd        `json:",omitempty"` // the last line
	// Bytes: the strings of this line, which are not all UTF-8, have a character for each of their
	// bytes: U+0000 to U+00FF.
	Bytes bool `json:",omitzero"`
}

type portableHeader struct {
	Codeq   string // "export"
	Version int
	Shards  int
	Time    time.Time
}

type portableSettings struct {
	Queue string
	codeq.Settings
}

// portableTask is a task with what TaskInfo does not say.
type portableTask struct {
	codeq.TaskInfo
	// KeyFree: the task does not hold its idempotency key (any more).
	KeyFree bool `json:",omitzero"`
	// HoldsTurn: the dead letter holds the turn of its group.
	HoldsTurn bool `json:",omitzero"`
}

// portableKey is an idempotency key that is taken for a time by a task that is not kept any more.
type portableKey struct {
	Hash  []byte // as it is stored
	Until time.Time
}

// held returns the key as it is to be stored.
func (k *portableKey) held() (key heldkeys.Key, err error) {
	if len(k.Hash) != len(key.Hash) {
		return key, fmt.Errorf("the hash of a key has %d bytes, and not %d", len(k.Hash), len(key.Hash))
	}
	if k.Until.UnixMilli() <= 0 {
		return key, fmt.Errorf("a key that is taken until %v", k.Until)
	}
	copy(key.Hash[:], k.Hash)
	key.Until = uint64(k.Until.UnixMilli())
	return key, nil
}

// portableEnd counts the lines, so that an export that is cut short is not taken for one.
type portableEnd struct {
	Settings, Schedules, Keys, Tasks int
}

// A stage is a part of an export. Tasks of a later stage may depend on those of an earlier one.
type stage int

const (
	stageEnded stage = iota // Done and Canceled
	stageDead               // dead letters
	stageHolds              // dead letters that hold turns
	stageBegun              // leased, or worked on before
	stageFresh              // never worked on; Blocked ones last, behind those for which they wait
)

func (t *portableTask) stage() stage {
	switch {
	case t.State == codeq.Done || t.State == codeq.Canceled:
		return stageEnded
	case t.State == codeq.Dead && t.HoldsTurn:
		return stageHolds
	case t.State == codeq.Dead:
		return stageDead
	case isBegun(&t.TaskInfo):
		return stageBegun
	}
	return stageFresh
}

// isBegun reports whether a task that has not ended has more than what its producer gave it.
func isBegun(t *codeq.TaskInfo) bool {
	return t.State == codeq.Leased || t.State != codeq.Dead && (t.Attempts > 0 || t.LastError != "")
}

// forJSON prepares a line to be written.
func (p *portable) forJSON() {
	if everyString(reflect.ValueOf(p), func(s string) (string, bool) { return s, utf8.ValidString(s) }) {
		return
	}
	p.Bytes = true
	everyString(reflect.ValueOf(p), func(s string) (string, bool) {
		var b strings.Builder
		for i := range len(s) {
			b.WriteRune(rune(s[i]))
		}
		return b.String(), true
	})
}

// fromJSON undoes forJSON; ok is false if that did not write it.
func (p *portable) fromJSON() (ok bool) {
	if !p.Bytes {
		return true
	}
	p.Bytes = false
	return everyString(reflect.ValueOf(p), func(s string) (string, bool) {
		b := make([]byte, 0, len(s))
		for _, r := range s {
			if r > 0xff {
				return s, false
			}
			b = append(b, byte(r))
		}
		return string(b), true
	})
}

// everyString replaces all strings within v by what f makes of them, until f returns false.
func everyString(v reflect.Value, f func(string) (string, bool)) bool {
	switch v.Kind() {
	case reflect.Pointer:
		return v.IsNil() || everyString(v.Elem(), f)
	case reflect.Struct:
		if v.Type() == reflect.TypeFor[time.Time]() {
			return true
		}
		for i := range v.NumField() {
			if !everyString(v.Field(i), f) {
				return false
			}
		}
	case reflect.Slice:
		if v.Type().Elem().Kind() != reflect.String {
			return v.Type().Elem().Kind() != reflect.Struct || everyElement(v, f)
		}
		return everyElement(v, f)
	case reflect.Map:
		return everyEntry(v, f)
	case reflect.String:
		s, ok := f(v.String())
		if ok && s != v.String() {
			v.SetString(s)
		}
		return ok
	}
	return true
}

func everyElement(v reflect.Value, f func(string) (string, bool)) bool {
	for i := range v.Len() {
		if !everyString(v.Index(i), f) {
			return false
		}
	}
	return true
}

// everyEntry does what everyString does for a map of strings to strings or numbers. It makes a new
// map, since others may use the old one.
func everyEntry(v reflect.Value, f func(string) (string, bool)) bool {
	if v.IsNil() {
		return true
	}
	next := reflect.MakeMapWithSize(v.Type(), v.Len())
	for it := v.MapRange(); it.Next(); {
		key, ok := f(it.Key().String())
		if !ok {
			return false
		}
		value := reflect.New(v.Type().Elem()).Elem()
		value.Set(it.Value())
		if !everyString(value, f) {
			return false
		}
		next.SetMapIndex(reflect.ValueOf(key), value)
	}
	v.Set(next)
	return true
}
