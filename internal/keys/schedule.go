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
	Cron     string
	TimeZone string

	Priority uint8
	Queue    string
	Tenant   string
	Record   []byte // as produced
}

// The first byte of a value. The rest has the same form.
const (
	scheduleForm = 1
	pausedForm   = 2
)

// Append appends the encoded value.
func (v *ScheduleValue) Append(dst []byte) []byte {
	form := byte(scheduleForm)
	if v.Paused {
		form = pausedForm
	}
	dst = append(dst, form)
	for _, at := range [...]uint64{v.Start, v.After, v.Last} {
		dst = binary.BigEndian.AppendUint64(dst, at)
	}
	dst = append(dst, v.Missed, v.Priority)
	dst = wire.AppendUint(dst, v.Every)
	for _, s := range [...]string{v.Cron, v.TimeZone, v.Queue, v.Tenant} {
		dst = wire.AppendBytes(dst, s)
	}
	return append(dst, v.Record...)
}

// ParseScheduleValue reads the value of a schedule. Record aliases b.
func ParseScheduleValue(b []byte) (v ScheduleValue, err error) {
	r := wire.NewReader(b)
	form := r.Byte()
	if form != scheduleForm && form != pausedForm {
		return v, malformed("schedule", b)
	}
	v.Paused = form == pausedForm
	v.Start, v.After, v.Last = r.Fixed64(), r.Fixed64(), r.Fixed64()
	v.Missed, v.Priority = r.Byte(), r.Byte()
	v.Every = r.Uint()
	v.Cron, v.TimeZone, v.Queue, v.Tenant = r.String(), r.String(), r.String(), r.String()
	v.Record = r.Rest()
	if r.Failed() {
		return ScheduleValue{}, malformed("schedule", b)
	}
	return v, nil
}
