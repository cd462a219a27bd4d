/* A lane: its client, its stream, and what the device does for it. */
proctype Lane(byte me) {
end:
  do
  :: done -> break

  /* A new stream. The server fences the one before; what that had queued is withdrawn. */
  :: d_step {
      !connected[me] && my_incarnation == incarnation && !IDLE(me) ->
      if
      :: attached[me] -> withdraw(me)
      :: else
      fi;
#ifdef BUG_NO_FENCE
      late[me] = sent1[me];
      late_generation[me] = sent1_generation[me];
#endif
      forget_messages(me);
      forget_answers(me);
      attached[me] = true;
      connected[me] = true;
      assert(accepted[me] <= logged[me]);                /* nobody else sends */
      assert((answered[me] >> (accepted[me] + 1)) == 0); /* not below what was answered */
      if
      :: lane_generation[me] < generation -> lane_generation[me] = generation
      :: else
      fi;
      may_repeat[me] = (BIT(accepted[me] + 1) - 2) & ~answered[me];
      next_send[me] = 1;
      do
      :: next_send[me] <= logged[me] && SEEN(me, next_send[me]) -> next_send[me]++
      :: else -> break
      od;
      skip
    }

  /* The client sends again what was not answered, and then what is new. */
  :: d_step {
      connected[me] && !sent2[me] && next_send[me] <= logged[me] ->
      n = next_send[me];
      do
      :: next_send[me]++;
        if
        :: next_send[me] <= logged[me] && SEEN(me, next_send[me])
        :: else -> break
        fi
      od;
      if
      :: !sent1[me] -> sent1[me] = n; sent1_generation[me] = lane_generation[me]
      :: else -> sent2[me] = n; sent2_generation[me] = lane_generation[me]
      fi
    }
  :: atomic {
      connected[me] && !sent2[me] && next_send[me] == logged[me] + 1 && ROOM_FOR_ANSWERS(me) && MAY_BEGIN(me) ->
      if
      :: true -> i = 0
      :: faults > 0 && !redo[me] -> i = BAD; spend()
      fi;
      d_step {
        logged[me]++;
        next_send[me]++;
        if
        :: redo[me] ->
          n = 0;
          do
          :: redo[me] & BIT(n) -> break
          :: else -> n++
          od;
          ITEM_AT(me, logged[me]) = n;
          redo[me] = redo[me] & ~BIT(n)
        :: else -> ITEM_AT(me, logged[me]) = next_item[me] + i; next_item[me]++
        fi;
        if
        :: !sent1[me] -> sent1[me] = logged[me]; sent1_generation[me] = lane_generation[me]
        :: else -> sent2[me] = logged[me]; sent2_generation[me] = lane_generation[me]
        fi
      }
    }

  /* Losses alone, while nobody knows whether the step was taken. */
  :: d_step {
      faults > 0 && LOOKING && connected[me] && !sent2[me] && next_send[me] == logged[me] + 1 && ROOM_FOR_ANSWERS(me) ->
      spend();
      logged[me]++;
      next_send[me]++;
      ITEM_AT(me, logged[me]) = LOOK;
      if
      :: !sent1[me] -> sent1[me] = logged[me]; sent1_generation[me] = lane_generation[me]
      :: else -> sent2[me] = logged[me]; sent2_generation[me] = lane_generation[me]
      fi
    }

  /* The server reads a message, if the chunk has not to wait. */
  :: d_step {
      CAN_ARRIVE(me) ->
      submit(me, sent1[me], sent1_generation[me]);
      sent1[me] = sent2[me];
      sent1_generation[me] = sent2_generation[me];
      sent2[me] = 0;
      sent2_generation[me] = 0
    }
  :: d_step { /* the same message is delivered once more */
      faults > 0 && CAN_ARRIVE(me) ->
      spend();
      may_repeat[me] = may_repeat[me] | BIT(sent1[me]);
      submit(me, sent1[me], sent1_generation[me])
    }
  :: d_step { /* two are delivered the wrong way round */
      faults > 0 && sent2[me] && attached[me] && refusal[me] == NONE ->
      spend();
      n = sent1[me];
      sent1[me] = sent2[me];
      sent2[me] = n;
      n = sent1_generation[me];
      sent1_generation[me] = sent2_generation[me];
      sent2_generation[me] = n
    }
#ifdef BUG_NO_FENCE
  :: d_step { /* of a stream that was fenced: should have no effect */
      late[me] != 0 ->
      if
      :: attached[me] && refusal[me] == NONE && !(IS_NEXT(me, late[me]) && WAITS(late_generation[me])) ->
        submit(me, late[me], late_generation[me])
      :: else
      fi;
      late[me] = 0;
      late_generation[me] = 0
    }
#endif

  /* The device starts a chunk, and it is answered; later it is in dW. */
  :: d_step {
      started[me] < accepted[me] ->
      started[me]++;
      if
      :: connected[me] && attached[me] -> owed[me] = owed[me] | BIT(started[me])
      :: else
      fi
    }
  :: d_step {
      applied[me] < started[me] ->
      applied[me]++;
      add(me, applied[me])
    }

  /* An answer arrives. */
  :: d_step {
      connected[me] && owed[me] ->
      n = 1;
      do
      :: owed[me] & BIT(n) -> break
      :: else -> n++
      od;
      assert(!(owed_repeat[me] & BIT(n)) || (may_repeat[me] & BIT(n))); /* else somebody else sent it */
      owed[me] = owed[me] & ~BIT(n);
      owed_repeat[me] = owed_repeat[me] & ~BIT(n);
      if
      :: !SEEN(me, n) && ITEM_AT(me, n) >= BAD && ITEM_AT(me, n) != LOOK -> redo[me] = redo[me] | BIT(ITEM_AT(me, n) - BAD)
      :: else
      fi;
      answered[me] = answered[me] | BIT(n)
    }

  /* A stream that was refused a chunk ends once everything before that is answered and applied. */
  :: d_step {
      connected[me] && refusal[me] != NONE && !owed[me] && SETTLED(me) ->
      if
      :: refusal[me] == WRONG_GENERATION && refused_at[me] == lane_generation[me] ->
        lane_generation[me] = refused_at[me] + 1 /* it is frozen */
      :: refusal[me] == WRONG_GENERATION && refused_at[me] != lane_generation[me] ->
        lane_generation[me] = refused_at[me]
      :: else
      fi;
      forget_messages(me);
      forget_answers(me);
      attached[me] = false;
      connected[me] = false;
      next_send[me] = 0;
      may_repeat[me] = 0
    }

  /* The connection is cut; the server notices when it does, or when another stream comes. */
  :: d_step {
      faults > 0 && connected[me] ->
      spend();
      connected[me] = false;
      next_send[me] = 0;
      may_repeat[me] = 0;
      owed[me] = 0;
      owed_repeat[me] = 0
    }
  :: d_step {
      attached[me] && !connected[me] ->
      withdraw(me);
      forget_messages(me);
      forget_answers(me);
      attached[me] = false
    }
  od
}
