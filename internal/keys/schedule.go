package keys

import (
	"encoding/binary"

	"codeq/internal/wire"
)

// AppendSchedule appends the key of a schedule.
func AppendSchedule(dst []byte, name string) []byte {
	return append(append(dst, Schedule), name...)
}

// ParseSchedule reads the key of a schedule.
func ParseSchedule(key []byte) (name string, err error) {
	if len(key) < 2 || key[0] != Schedule {
		return "", malformed("schedule", key)
	}
	return string(key[1:]), nil
}

// ScheduleValue is a schedule: its progress, its times, and the task of a tick. Times are
// milliseconds since 1970.
type ScheduleValue struct {
	Start    uint64 // time of setting; intervals count from here
	After    uint64 // ticks up to here are over
	Last     uint64 // the tick that produced the last task; 0: none
	Missed   uint8
	Paused   bool   // does not tick
	Every    uint64 // ms; 0: by Cron
	Jitter   uint64 // ms; since FormatOfSteps
	Cron     string
	TimeZone string

	Priority uint8
	Queue    string
	Tenant   string
	Record   []byte // as produced
}

// The first byte of a value: the sum of firstForm, and of those that apply. The rest has the same
// form, but for Jitter.
const (
	firstForm  = 1
	pausedForm = 1
	jitterForm = 2
	lastForm   = firstForm + pausedForm + jitterForm
)

// Append appends the encoded value.
func (v *ScheduleValue) Append(dst []byte) []byte {
	form := byte(firstForm)
	if v.Paused {
		form += pausedForm
	}
	if v.Jitter != 0 {
		form += jitterForm
	}
	dst = append(dst, form)
	for _, at := range [...]uint64{v.Start, v.After, v.Last} {
		dst = binary.BigEndian.AppendUint64(dst, at)
	}
	dst = append(dst, v.Missed, v.Priority)
	if dst = wire.AppendUint(dst, v.Every); v.Jitter != 0 {
		dst = wire.AppendUint(dst, v.Jitter)
	}
	for _, s := range [...]string{v.Cron, v.TimeZone, v.Queue, v.Tenant} {
		dst = wire.AppendBytes(dst, s)
	}
	return append(dst, v.Record...)
}

// ParseScheduleValue reads the value of a schedule. Record aliases b.
func ParseScheduleValue(b []byte) (v ScheduleValue, err error) {
	r := wire.NewReader(b)
	form := r.Byte() - firstForm
	if form > lastForm-firstForm {
		return v, malformed("schedule", b)
	}
	v.Paused = form&pausedForm != 0
	v.Start, v.After, v.Last = r.Fixed64(), r.Fixed64(), r.Fixed64()
	v.Missed, v.Priority = r.Byte(), r.Byte()
	if v.Every = r.Uint(); form&jitterForm != 0 {
		if v.Jitter = r.Uint(); v.Jitter == 0 {
			r.Fail()
		}
	}
	v.Cron, v.TimeZone, v.Queue, v.Tenant = r.String(), r.String(), r.String(), r.String()
	v.Record = r.Rest()
	if r.Failed() {
		return ScheduleValue{}, malformed("schedule", b)
	}
	return v, nil
}
