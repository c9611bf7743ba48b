
# Written by `distdiag slurm cron`; the lines above are its settings. Times are seconds since 1970.
planned=${1:-$(date +%s)}
now=$(date +%s)
next=$((planned + every))
if [ "$next" -le "$now" ]; then # runs that were missed are not made up for
  next=$((now + every - (now - planned) % every))
fi

submit_next() {
  [ ! -e "$folder/stop" ] || { echo "distdiag slurm cron: stopped by $folder/stop"; return 0; }
  job=$(sbatch --parsable --begin="$(date -d "@$next" +%Y-%m-%dT%H:%M:%S)" "$folder/job.sh" "$next") || return 1
  echo "distdiag slurm cron: next run: job $job, $(date -d "@$next")"
}

# The next run is submitted first: whatever becomes of the command, and where SLURM ends it at --time, runs go on.
submitted=no
for pause in 1 5 20 60 0; do # a controller that restarts is back by then
  if submit_next; then submitted=yes; break; fi
  sleep "$pause"
done

"${command[@]}"
status=$?

if [ "$submitted" = no ] && ! submit_next; then
  echo "distdiag slurm cron: cannot submit the next run; this was the last one" >&2
  [ "$status" -ne 0 ] || status=75
fi
echo "$SLURM_JOB_ID $now $(date +%s) $status" >>"$folder/runs"
tail -n 1000 "$folder/runs" >"$folder/runs.part" && mv "$folder/runs.part" "$folder/runs"

# Clean-up: only files of this folder that have a job's name. A log that is too long keeps its end.
log_bytes=$((10 * 1024 * 1024))
log=$folder/logs/$SLURM_JOB_ID.out
if [ "$(stat -c %s "$log" 2>/dev/null || echo 0)" -gt "$log_bytes" ]; then
  tail -c "$log_bytes" "$log" >"$log.part" && cat "$log.part" >"$log"
  rm -f -- "$log.part"
fi
find "$folder/logs" -maxdepth 1 -type f -regex '.*/[0-9]+\.out' -printf '%T@ %f\n' | sort -rn |
  tail -n "+$((keep + 1))" | while read -r _ name; do rm -f -- "$folder/logs/$name"; done
exit "$status"
