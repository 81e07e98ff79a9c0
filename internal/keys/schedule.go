package keys

import "encoding/binary"

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

// ScheduleValue is a schedule: how far it has come, when it ticks, and the
// task that a tick produces. Times are milliseconds since 1970.
type ScheduleValue struct {
	Start    uint64 // when it was set; intervals count from here
	After    uint64 // ticks up to here are over
	Last     uint64 // the tick that produced the last task; 0: none has
	Missed   uint8
	Every    uint64 // ms; 0: by Cron
	Cron     string
	TimeZone string

	Priority uint8
	Queue    string
	Tenant   string
	Record   []byte // as produced
}

// scheduleForm begins a value and names the form of what follows.
const scheduleForm = 1

const schedulePositionLen = 3 * 8

// Append appends the encoded value.
func (v *ScheduleValue) Append(dst []byte) []byte {
	dst = append(dst, scheduleForm)
	for _, at := range [...]uint64{v.Start, v.After, v.Last} {
		dst = binary.BigEndian.AppendUint64(dst, at)
	}
	dst = append(dst, v.Missed, v.Priority)
	dst = binary.AppendUvarint(dst, v.Every)
	for _, s := range [...]string{v.Cron, v.TimeZone, v.Queue, v.Tenant} {
		dst = append(binary.AppendUvarint(dst, uint64(len(s))), s...)
	}
	return append(dst, v.Record...)
}

// ParseScheduleValue reads the value of a schedule. Record aliases b.
func ParseScheduleValue(b []byte) (v ScheduleValue, err error) {
	r := reader{b: b, ok: true}
	fixed := r.bytes(1 + schedulePositionLen + 2)
	if !r.ok || fixed[0] != scheduleForm {
		return v, malformed("schedule", b)
	}
	v.Start = binary.BigEndian.Uint64(fixed[1:])
	v.After = binary.BigEndian.Uint64(fixed[9:])
	v.Last = binary.BigEndian.Uint64(fixed[17:])
	v.Missed, v.Priority = fixed[25], fixed[26]
	v.Every = r.uvarint()
	for _, s := range [...]*string{&v.Cron, &v.TimeZone, &v.Queue, &v.Tenant} {
		n := r.uvarint()
		if n > uint64(len(b)) {
			r.ok = false
		}
		*s = string(r.bytes(int(n)))
	}
	if !r.ok {
		return ScheduleValue{}, malformed("schedule", b)
	}
	v.Record = b[r.n:]
	return v, nil
}
